"""The command line: `kvguard serve`, `plan`, `tune`, `classify`, `configs`.

Exit codes everywhere: 0 yes, 1 no (does not fit, nothing confirmed, start failed), 2 usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from kvguard import __version__
from kvguard.cli_classify import classify
from kvguard.cli_configs import app as configs_app
from kvguard.cli_plan import plan
from kvguard.settings import Settings, SettingsError, load

EXIT_NO = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="kvguard",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Makes running out of memory a non-event for vLLM and llama.cpp.",
    epilog="Start here: [bold]kvguard serve MODEL.gguf[/bold]. Anything after [bold]--[/bold] goes to the "
    "engine unchanged.",
)
app.command("plan")(plan)
app.command("classify")(classify)
app.add_typer(configs_app, name="configs")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvguard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Makes running out of memory a non-event for vLLM and llama.cpp."""


Model = Annotated[str, typer.Argument(help="GGUF file or model directory; nothing: the demo model.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file; see kvguard.example.toml.")]
Backend = Annotated[
    str | None,
    typer.Option(
        help="auto, llama-server, embedded, llama-cpp-python, vllm or attach.", rich_help_panel="Engine"
    ),
]
LlamaServer = Annotated[
    str | None, typer.Option(help="Path of a llama-server binary.", rich_help_panel="Engine")
]
LlamaCppPython = Annotated[
    str | None, typer.Option(help="Python that has llama-cpp-python\\[server].", rich_help_panel="Engine")
]
VllmPython = Annotated[str | None, typer.Option(help="Python that has vllm.", rich_help_panel="Engine")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="Put the engine into a memory cgroup of this size, e.g. 600MiB.", rich_help_panel="Memory"
    ),
]
Headroom = Annotated[
    str | None,
    typer.Option(
        help="Never handed out: 2GiB or 10%. Default: max(1 GiB, 10 %) of a GPU, 10 % of a cgroup or host.",
        rich_help_panel="Memory",
    ),
]
Batch = Annotated[int | None, typer.Option(help="Sequences that run at once.", rich_help_panel="Knobs")]
Ctx = Annotated[
    int | None, typer.Option(help="Most tokens of one sequence (prompt + new).", rich_help_panel="Knobs")
]
Pool = Annotated[
    int | None, typer.Option(help="KV tokens that all sequences share.", rich_help_panel="Knobs")
]
KvPool = Annotated[str | None, typer.Option(help="unified or split.", rich_help_panel="Knobs")]
KvType = Annotated[str | None, typer.Option(help="KV cache type: f16, q8_0, ...", rich_help_panel="Knobs")]
GpuLayers = Annotated[int | None, typer.Option(help="Layers on the GPU; -1: all.", rich_help_panel="Knobs")]
Prefill = Annotated[
    int | None, typer.Option(help="Tokens of one prefill pass (micro-batch).", rich_help_panel="Knobs")
]
Prefer = Annotated[
    str | None,
    typer.Option(help="balanced, context, throughput or quality.", rich_help_panel="Knobs"),
]
MinCtx = Annotated[
    int | None, typer.Option(help="Never a context under this.", rich_help_panel="Degradation")
]
MinBatch = Annotated[
    int | None, typer.Option(help="Never fewer sequences than this.", rich_help_panel="Degradation")
]
Never = Annotated[
    list[str] | None,
    typer.Option(help="Never change this rung (repeatable).", rich_help_panel="Degradation"),
]
StateDir = Annotated[
    Path | None,
    typer.Option(envvar="KVGUARD_STATE_DIR", help="Journal, logs, learned tables.", rich_help_panel="State"),
]
LogLevel = Annotated[
    str | None, typer.Option(help="debug, info, warning or error (terminal).", rich_help_panel="State")
]


@app.command()
def serve(
    ctx: typer.Context,
    model: Model = "",
    config: Config = None,
    host: Annotated[
        str | None, typer.Option(help="Address to bind.", rich_help_panel="Server", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port to bind; 0: a free one.", rich_help_panel="Server", show_default="8000"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="NAME=KEY or KEY that clients must send (repeatable).", rich_help_panel="Server"),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one NAME=KEY or KEY a line.", rich_help_panel="Server")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="KVGUARD_ADMIN_KEY", help="Key of /guard/*.", rich_help_panel="Server"),
    ] = None,
    insecure_listen: Annotated[
        bool, typer.Option(help="Bind beyond loopback without any key.", rich_help_panel="Server")
    ] = False,
    backend: Backend = None,
    llama_server: LlamaServer = None,
    llama_cpp_python: LlamaCppPython = None,
    vllm_python: VllmPython = None,
    attach: Annotated[
        str | None,
        typer.Option(help="Guard a running backend at this URL: admission only.", rich_help_panel="Engine"),
    ] = None,
    memory_limit: MemoryLimit = None,
    headroom: Headroom = None,
    batch: Batch = None,
    ctx_tokens: Annotated[
        int | None,
        typer.Option("--ctx", help="Most tokens of one sequence (prompt + new).", rich_help_panel="Knobs"),
    ] = None,
    pool: Pool = None,
    kv_pool: KvPool = None,
    kv_type: KvType = None,
    gpu_layers: GpuLayers = None,
    prefill: Prefill = None,
    prefer: Prefer = None,
    config_id: Annotated[
        str | None,
        typer.Option(help="Serve this configuration of the journal.", rich_help_panel="Knobs"),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(help="adaptive, reserve, fixed:N or unlimited.", rich_help_panel="Admission"),
    ] = None,
    queue_requests: Annotated[
        int | None, typer.Option(help="Requests that may wait.", rich_help_panel="Admission")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Longest wait in the queue, seconds.", rich_help_panel="Admission")
    ] = None,
    queue_keepalive: Annotated[
        bool, typer.Option(help="Send SSE comments to streams that wait.", rich_help_panel="Admission")
    ] = False,
    degrade: Annotated[
        str | None,
        typer.Option(help="Order of the rungs: any permutation or subset.", rich_help_panel="Degradation"),
    ] = None,
    degrade_strict: Annotated[
        bool, typer.Option(help="Walk every rung, even a useless one.", rich_help_panel="Degradation")
    ] = False,
    min_ctx: MinCtx = None,
    min_batch: MinBatch = None,
    never: Never = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Another quantisation of this model (repeatable).", rich_help_panel="Degradation"),
    ] = None,
    on_event: Annotated[
        str | None, typer.Option(help="URL that is told of each step.", rich_help_panel="State")
    ] = None,
    state_dir: StateDir = None,
    log_level: LogLevel = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print accounts and command line; start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Serve MODEL under guard: starts the engine, confirms that it fits, admits what fits, survives the rest.

    Examples:

      kvguard serve model.gguf

      kvguard serve model.gguf --memory-limit 4GiB --min-ctx 4096

      kvguard serve --attach http://127.0.0.1:8080
    """
    from kvguard.app import dry_run as run_dry
    from kvguard.app import serve as run_serve

    settings = _settings(
        config,
        server=dict(
            host=host,
            port=port,
            api_keys=_named_keys(api_key),
            api_key_file=api_key_file,
            admin_key=admin_key,
            insecure_listen=insecure_listen or None,
        ),
        model=dict(path=model or None, variants=tuple(variant) if variant else None),
        backend=dict(
            kind="attach" if attach else backend,
            llama_server=llama_server,
            llama_cpp_python=llama_cpp_python,
            vllm_python=vllm_python,
            attach=attach,
            extra_args=tuple(ctx.obj or ()) or None,
        ),
        memory=dict(limit_bytes=memory_limit, headroom=headroom),
        knobs=dict(
            batch=batch,
            ctx_tokens=ctx_tokens,
            pool_tokens=pool,
            pool_kind=kv_pool,
            kv_type=kv_type,
            gpu_layers=gpu_layers,
            prefill_tokens=prefill,
            prefer=prefer,
            config_id=config_id,
        ),
        degrade=dict(
            order=degrade,
            strict=degrade_strict or None,
            min_ctx=min_ctx,
            min_batch=min_batch,
            never=tuple(never) if never else None,
        ),
        admission=dict(
            policy=admission,
            queue_requests=queue_requests,
            deadline_s=deadline,
            queue_keepalive=queue_keepalive or None,
        ),
        state=dict(directory=state_dir, log_level=log_level, on_event=on_event),
    )
    raise typer.Exit(run_dry(settings, as_json=as_json) if dry_run else run_serve(settings))


@app.command()
def tune(
    ctx: typer.Context,
    model: Model = "",
    config: Config = None,
    backend: Backend = None,
    llama_server: LlamaServer = None,
    llama_cpp_python: LlamaCppPython = None,
    vllm_python: VllmPython = None,
    memory_limit: MemoryLimit = None,
    headroom: Headroom = None,
    prefer: Prefer = None,
    kv_type: KvType = None,
    min_ctx: MinCtx = None,
    min_batch: MinBatch = None,
    max_ctx: Annotated[
        int | None, typer.Option(help="Never a context over this.", rich_help_panel="Knobs")
    ] = None,
    never: Never = None,
    repeats: Annotated[int, typer.Option(min=1, help="Restarts in a row that confirm.")] = 3,
    budget: Annotated[str, typer.Option(help="Stop after this long, e.g. 10m.")] = "",
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Measure every variant's largest context.")
    ] = False,
    ctx_ladder: Annotated[
        str, typer.Option(help="Plain ladder at batch 1, e.g. 2048,4096,8192: a restart a step.")
    ] = "",
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
) -> None:
    """Find and confirm the best configuration of MODEL on this card, by restarts and real requests."""
    from kvguard.app import tune as run_tune

    settings = _settings(
        config,
        model=dict(path=model or None),
        backend=dict(
            kind=backend,
            llama_server=llama_server,
            llama_cpp_python=llama_cpp_python,
            vllm_python=vllm_python,
            extra_args=tuple(ctx.obj or ()) or None,
        ),
        memory=dict(limit_bytes=memory_limit, headroom=headroom),
        knobs=dict(kv_type=kv_type, prefer=prefer, max_ctx_tokens=max_ctx),
        degrade=dict(min_ctx=min_ctx, min_batch=min_batch, never=tuple(never) if never else None),
        state=dict(directory=state_dir),
    )
    try:
        budget_s = _seconds(budget) if budget else float("inf")
        rungs = tuple(int(step) for step in ctx_ladder.split(",")) if ctx_ladder else ()
    except ValueError as exc:
        fail(str(exc), EXIT_USAGE)
    raise typer.Exit(
        run_tune(
            settings, repeats=repeats, budget_s=budget_s, ctx_ladder=rungs, matrix=matrix, as_json=as_json
        )
    )


def _seconds(text: str) -> float:
    """Read 90, 90s, 10m or 1h. Raises ValueError."""
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    try:
        return float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: write e.g. 90s, 10m or 1h") from None


def _settings(config: Path | None, **sections: dict[str, Any]) -> Settings:
    """Only what was given on the command line overrides the file and the environment."""
    given = {
        name: {key: value for key, value in section.items() if value is not None}
        for name, section in sections.items()
    }
    try:
        return load(config, {name: section for name, section in given.items() if section})
    except SettingsError as exc:
        fail(str(exc), EXIT_USAGE)


def _named_keys(keys: list[str] | None) -> dict[str, str] | None:
    if not keys:
        return None
    named: dict[str, str] = {}
    for number, key in enumerate(keys, 1):
        name, separator, value = key.partition("=")
        named.update({name: value} if separator else {f"key{number}": key})
    return named


def fail(message: str, code: int = EXIT_NO) -> NoReturn:
    """Print one error for a person and end. Raises typer.Exit."""
    Console(stderr=True).print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def main() -> None:
    """Entry point: what follows `--` belongs to the engine."""
    argv = sys.argv[1:]
    engine_args: list[str] = []
    if "--" in argv and argv[:1] in (["serve"], ["tune"]):
        split = argv.index("--")
        argv, engine_args = argv[:split], argv[split + 1 :]
    app(args=argv, obj=engine_args, prog_name="kvguard")


if __name__ == "__main__":
    main()
