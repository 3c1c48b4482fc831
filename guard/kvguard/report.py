"""What `serve` shows a person: the accounts before a start, and how to use the server after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvguard.domain import Accounts, CardInfo, Knobs
from kvguard.settings import format_size


def describe(knobs: Knobs) -> str:
    """One line: what a configuration means for the user."""
    pool = f"{knobs.pool_tokens} KV tokens {'shared' if knobs.pool_kind == 'unified' else 'split'}"
    layers = "all layers" if knobs.gpu_layers == -1 else f"{knobs.gpu_layers} layers"
    return (
        f"batch {knobs.batch}, ctx {knobs.ctx_tokens}, {pool}, {knobs.quant.label or 'weights as stored'}, "
        f"KV {knobs.kv_type}, {layers} on the card, micro-batch {knobs.prefill_tokens}"
    )


def print_accounts(console: Console, accounts: Accounts, card: CardInfo, usable_bytes: int) -> None:
    """The three accounts, line by line, against what the card can give."""
    table = Table(title=f"Memory on {card.name} ({format_size(card.total_bytes)})", title_justify="left")
    for heading in ("account", "part", "size", "basis"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for entry in accounts.entries:
        place = "" if entry.on_card else " (host)"
        table.add_row(entry.account, entry.name + place, format_size(entry.size_bytes), entry.basis.value)
    table.add_section()
    for name in ("weights", "kv", "overhead"):
        table.add_row(name, "total on the card", format_size(accounts.total_of(name)), "")
    table.add_section()
    table.add_row("all", "needed", format_size(accounts.total_bytes), "")
    table.add_row("", "usable", format_size(usable_bytes), "total - others - headroom")
    console.print(table)


def print_dry_run(
    console: Console,
    *,
    accounts: Accounts,
    card: CardInfo,
    usable_bytes: int,
    knobs: Knobs,
    command: Sequence[str],
    why: str,
) -> None:
    print_accounts(console, accounts, card, usable_bytes)
    console.print(f"[bold]configuration[/] ({why}): {describe(knobs)}", highlight=False)
    console.print("[bold]command[/]: ", end="")
    console.print(" ".join(command), highlight=False, soft_wrap=True, markup=False)


def dry_run_json(
    *,
    accounts: Accounts,
    card: CardInfo,
    usable_bytes: int,
    knobs: Knobs,
    command: Sequence[str],
    why: str,
    fits: bool,
) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(
        {
            "fits": fits,
            "why": why,
            "card": card,
            "usable_bytes": usable_bytes,
            "weights_bytes": accounts.weights_bytes,
            "kv_bytes": accounts.kv_bytes,
            "overhead_bytes": accounts.overhead_bytes,
            "entries": accounts.entries,
            "knobs": knobs,
            "command": tuple(command),
        }
    )
    return plain


def ready_message(base_url: str, model: str, knobs: Knobs | None, *, needs_key: bool, chat: bool) -> str:
    """The one ready line, and two examples that work when pasted."""
    auth = '-H "Authorization: Bearer $KVGUARD_KEY" ' if needs_key else ""
    python_key = 'os.environ["KVGUARD_KEY"]' if needs_key else '"none"'
    route, body, call = _examples(model, chat=chat)
    imports = "import os; from openai import OpenAI" if needs_key else "from openai import OpenAI"
    return (
        f"kvguard is ready: {base_url}/v1  ({model}; {describe(knobs) if knobs else 'attached backend'})\n\n"
        f"  curl {base_url}{route} {auth}-H 'Content-Type: application/json' -d '{body}'\n\n"
        f"  python - <<'EOF'\n"
        f"{imports}\n"
        f'client = OpenAI(base_url="{base_url}/v1", api_key={python_key})\n'
        f"{call}\n"
        f"EOF\n"
    )


def _examples(model: str, *, chat: bool) -> tuple[str, str, str]:
    if chat:
        return (
            "/v1/chat/completions",
            f'{{"model": "{model}", "max_tokens": 48, '
            '"messages": [{"role": "user", "content": "Hello!"}]}',
            f'answer = client.chat.completions.create(model="{model}", max_tokens=48,\n'
            '    messages=[{"role": "user", "content": "Hello!"}])\n'
            "print(answer.choices[0].message.content)",
        )
    return (
        "/v1/completions",
        f'{{"model": "{model}", "max_tokens": 48, "prompt": "The three primary colours are"}}',
        f'answer = client.completions.create(model="{model}", max_tokens=48,\n'
        '    prompt="The three primary colours are")\n'
        "print(answer.choices[0].text)",
    )
