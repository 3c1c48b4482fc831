"""What to give up when memory runs out."""
