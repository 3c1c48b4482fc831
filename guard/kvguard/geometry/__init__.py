"""Memory geometry: what each kind of model keeps of its tokens, and what that costs on each engine. Pure."""

from kvguard.geometry.gguf_rules import gguf_geometry
from kvguard.geometry.hf_rules import hf_geometry
from kvguard.geometry.llama_cpp import LlamaSettings, kv_bytes, kv_parts
from kvguard.geometry.price import Price, llama_price, vllm_price
from kvguard.geometry.shapes import Geometry, GeometryError, LayerKV
from kvguard.geometry.vllm import VllmSettings

__all__ = [
    "Geometry",
    "GeometryError",
    "LayerKV",
    "LlamaSettings",
    "Price",
    "VllmSettings",
    "gguf_geometry",
    "hf_geometry",
    "kv_bytes",
    "kv_parts",
    "llama_price",
    "vllm_price",
]
