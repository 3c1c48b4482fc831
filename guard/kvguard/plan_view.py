"""Draw the reports of `kvguard plan` on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvguard.settings import format_size as size

BAR_CELLS = 60
_STYLES = {"weights": ("█", "blue"), "kv": ("▓", "green"), "overhead": ("▒", "yellow"), "free": ("·", "dim")}


def tokens(count: int) -> str:
    return f"{count:,}" if count else "–"


def count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def show_plan(console: Console, report: dict[str, Any]) -> None:
    """One model on one card."""
    model, card, knobs = report["model"], report["card"], report["knobs"]
    console.print(
        f"[bold]{model['name']}[/]  {model['architecture']}, {count(model['parameters'])} parameters, "
        f"{model['quant'] or '?'} ({model['bits']:.2f} bit), trained for {tokens(model['ctx_train'])} tokens"
    )
    for warning in model["warnings"]:
        console.print(f"[yellow]warning:[/] {warning}")
    _show_card(console, card)
    layers = "all" if knobs["gpu_layers"] < 0 else knobs["gpu_layers"]
    console.print(
        f"batch {knobs['batch']}, context {tokens(knobs['ctx_tokens'])}, pool {tokens(knobs['pool_tokens'])} "
        f"({knobs['pool_kind']}), KV {knobs['kv_type']}, prefill {knobs['prefill_tokens']}"
        + (f", {layers} layers on the card" if card["kind"] == "gpu" else "")
    )
    console.print(_accounts_table(report["accounts"]))
    console.print(_bar(report))
    _show_verdict(console, report)
    console.print(_limits_table(report))
    for record in report["measured"]:
        predicted = record["predicted_bytes"]
        beside = f", predicted {size(predicted)}" if predicted else ""
        console.print(
            f"measured at context {tokens(record['ctx_tokens'])}: {size(record['peak_bytes'])}{beside}"
        )


def _show_card(console: Console, card: dict[str, Any]) -> None:
    console.print(
        f"[bold]{card['label']}[/]  {size(card['total_bytes'])} - {size(card['used_by_others_bytes'])} used "
        f"by others - {size(card['headroom_bytes'])} headroom = [bold]{size(card['usable_bytes'])} usable[/]",
        soft_wrap=True,
    )


def _show_verdict(console: Console, report: dict[str, Any]) -> None:
    if report["fits"]:
        console.print(f"[green bold]fits[/], {size(report['free_bytes'])} left", highlight=False)
        return
    console.print(f"[red bold]{report['verdict']}[/]: {report['reason']}", highlight=False)
    console.print(f"next: {report['next']}", highlight=False)


def _accounts_table(accounts: dict[str, Any]) -> Table:
    table = Table("account", "what", "basis", box=None, pad_edge=False)
    table.add_column("on the card", justify="right")
    table.add_column("host", justify="right")
    for entry in accounts["entries"]:
        shown = size(entry["bytes"])
        name = entry["name"] + (f" ({entry['note']})" if entry["note"] else "")
        here = (shown, "") if entry["on_card"] else ("", shown)
        table.add_row(entry["account"], name, entry["basis"], *here)
    host = size(accounts["host_bytes"]) if accounts["host_bytes"] else ""
    table.add_section()
    table.add_row("[bold]total[/]", "", "", f"[bold]{size(accounts['total_bytes'])}[/]", host)
    return table


def _bar(report: dict[str, Any]) -> Text:
    """The accounts against what is usable, or against each other where they are more."""
    accounts, usable = report["accounts"], report["card"]["usable_bytes"]
    whole = max(usable, accounts["total_bytes"], 1)
    bar, used = Text(), 0
    for name in ("weights", "kv", "overhead"):
        cells = round(accounts[f"{name}_bytes"] / whole * BAR_CELLS)
        symbol, style = _STYLES[name]
        bar.append(symbol * cells, style)
        used += cells
    bar.append(_STYLES["free"][0] * max(BAR_CELLS - used, 0), _STYLES["free"][1])
    percent = 100 * accounts["total_bytes"] / usable if usable else 0
    bar.append(f" {percent:.0f} %  " if usable else "  ")
    for name in ("weights", "kv", "overhead"):
        bar.append(f"{_STYLES[name][0]} {name} ", _STYLES[name][1])
    return bar


def _limits_table(report: dict[str, Any]) -> Table:
    """The largest context for each batch beside the largest batch for each context."""
    table = Table("batch", box=None, pad_edge=False, title="how far it goes", title_justify="left")
    table.add_column("largest context", justify="right")
    table.add_column("   context", justify="right")
    table.add_column("largest batch", justify="right")
    left, right = list(report["max_ctx_by_batch"].items()), list(report["max_batch_by_ctx"].items())
    for i in range(max(len(left), len(right))):
        batch, ctx = left[i] if i < len(left) else ("", None)
        context, most = right[i] if i < len(right) else ("", None)
        table.add_row(
            batch,
            tokens(ctx) if ctx is not None else "",
            tokens(int(context)) if context else "",
            tokens(most) if most is not None else "",
        )
    return table


def show_matrix(console: Console, report: dict[str, Any]) -> None:
    """Rows are cards, columns variants; a measured cell is marked."""
    table = Table("card", "usable", box=None, pad_edge=False)
    for variant in report["variants"]:
        title = f"{variant['quant'] or variant['name']}\n{size(variant['weights_bytes'])}"
        table.add_column(title, justify="right")
    table.add_column("choice")
    for row in report["rows"]:
        cells = [_cell_text(cell) for cell in row["cells"]]
        card = row["card"]
        table.add_row(card["label"], size(card["usable_bytes"]), *cells, row["choice"] or "none fits")
    console.print(table)
    console.print("largest context for one sequence; [green]●[/] measured, ○ predicted", highlight=False)


def _cell_text(cell: dict[str, Any]) -> str:
    if not cell["feasible"]:
        return f"[red]not feasible:[/] {cell['verdict']}"
    mark = "[green]●[/]" if cell["basis"] == "measured" else "○"
    return f"{mark} {cell['ctx_tokens']:,}"


def show_cards(console: Console, report: dict[str, Any]) -> None:
    """Cards without a model: what they could carry."""
    for card in report["cards"]:
        _show_card(console, card)
        table = Table("weights", box=None, pad_edge=False)
        table.add_column("most parameters", justify="right")
        for bits, parameters in card["most_parameters"].items():
            table.add_row(f"{bits} bit", count(parameters))
        console.print(table)
    console.print("a loose bound, weights alone: KV cache and overhead come on top", style="dim")


def show_parameters(console: Console, report: dict[str, Any]) -> None:
    """A model that is only a number of parameters."""
    table = Table("weights", box=None, pad_edge=False)
    table.add_column(f"of {count(report['parameters'])} parameters", justify="right")
    for bits, size_bytes in report["weights_bytes"].items():
        table.add_row(f"{bits} bit (floor)", size(size_bytes))
    for name, size_bytes in report["real_formats_bytes"].items():
        table.add_row(name, size(size_bytes))
    console.print(table)
    if report["kv_bytes"]:
        console.print(f"KV: {report['kv_bytes_per_token']:,} bytes a token", highlight=False)
        for ctx, size_bytes in report["kv_bytes"].items():
            console.print(f"  {int(ctx):>9,} tokens  {size(size_bytes)}", highlight=False)
    else:
        console.print("KV: give --layers, --kv-heads and --head-dim", style="dim")
    if "card" in report:
        _show_card(console, report["card"])
        verdict = (
            "[green bold]weights fit[/]"
            if report["fits"]
            else f"[red bold]weights do not fit[/]: {report['reason']}"
        )
        console.print(verdict, highlight=False)
