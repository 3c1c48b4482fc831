"""Lines that say how to read other lines: harmless ones, recoveries, effects, and deaths of children."""

# ruff: noqa: E501 - a wording is kept on one line, so that it can be searched for

from __future__ import annotations

import re
from enum import IntEnum

from kvguard.diagnosis.pattern_table import PatternTable

HARMLESS = re.compile(
    r"""is\ preempted\ by|PreemptionMode|preempt(?:ed|ion)\b.{0,80}(?:recompute|KV\ cache\ space)|retracted_reqs|[Rr]etract\ requests
    |failed\ to\ m(?:un)?lock|RLIMIT_MEMLOCK|ulimit\ -l
    |fit_params\w*:\ (?!.*\bsuccess).{0,40}(?:failed\ to\ fit|cannot\ (?:fit|meet)|encountered)|failed\ to\ fit\ params|cannot\ meet\ free\ memory\ target
    |(?:of|allocate)\ pinned\ memory|pinned\ memory.{0,40}fail|destroy_process_group\(\)|leaked\ (?:semaphore|shared_memory)|resource_tracker
    |Unable\ to\ register\ cu\w+\ factory|computation_placer\ already|Could\ not\ find\ TensorRT|TF-TRT\ Warning|oneDNN\ custom\ operations
    |(?:Future|User|Deprecation|Runtime|Resource|Syntax)Warning\b|Failed\ to\ import\ from\ vllm\._\w+|Triton\ (?:is\ )?not\ installed
    |Ignore\ import\ error|no\ remote\ preset\ found|HEAD\ failed,\ status|[Ff]orcing\ full\ prompt\ re-processing
    |[Cc]lient\ (?:has\ )?(?:disconnected|closed|cancelled|canceled)|connection\ closed\ by\ (?:client|peer)|ClientDisconnect|BrokenPipeError|ConnectionResetError|CancelledError|stop:\ cancel\ task|Aborted\ request|broken\ pipe
    |already\ in\ use,\ (?:trying|using)|is\ in\ use,\ trying|PYTORCH_(?:CUDA_)?ALLOC_CONF\ (?:is|was|has)
    |--help|default:\ |Using\ default|to\ avoid\ (?:possible\ )?(?:out\ of\ memory|OOM)|may\ (?:cause|lead\ to|result\ in)\ .{0,30}(?:OOM|out\ of\ memory)|(?:might|could)\ (?:cause|run)\ .{0,30}(?:OOM|out\ of\ memory)
    |CUDA\ kernel\ errors\ might\ be|For\ debugging\ consider|Compile\ with\ `?TORCH_USE_CUDA_DSA|truncating\ input\ prompt|posix_madvise|VirtualLock|shared\ memory\ broadcast\ block|VRAM\ usage\ didn't\ recover|client\ socket\ has\ failed|recvValue\ failed
    |(?:[Ii]f|[Ww]hen|[Ii]n\ case)\ (?:you\ (?:see|get|encounter|run\ into|hit)\ )?(?:an?\ |the\ )?(?:CUDA\ )?(?:out[ -]of[ -]memory|OOM)\b.{0,60}(?:occur|happen|error|consider|try|reduce)|backend_ids_changed|reallocating\ \w+\ buffer
    |failed\ to\ save\ (?:state|slot)|prompt\ cache\ .{0,60}(?:limit|skipp)|failed\ to\ allocate\ memory\ for\ prompt\ cache\ state|failed\ to\ initialize\ NUMA|oom_score_adj(?:=|\ set)""",
    re.VERBOSE,
)
"""Never evidence of a failure, whatever words they hold."""

RECOVERY = re.compile(
    r"""retrying\ without\ pipeline|retrying\ with|[Rr]etry(?:ing)?\ (?:succeeded|successful)|succeeded\ (?:after|on)\ (?:retry|attempt)
    |fall(?:ing|s)?[ -]?back(?:ed)?\b|fell\ back|using\ host\ memory\ fallback|[Rr]etrying\b|will\ (?:be\ )?retr(?:y|ied)|re-?queued|disabling\ .{0,60}and\ continu|continuing\ without|trying\ (?:next|another|port)
    |(?:load|started|allocated|captured)\w*\ success""",
    re.VERBOSE,
)
"""What failed just before was tried again, or done another way."""

ANSWERED = re.compile(
    r"""\bHTTP/1\.[01]\"?\ 200|\b200\ OK|slot\ +print_timing|slot\ +release:|(?:prompt\ )?eval\ time\ =|gen(?:eration)?\ throughput.{0,30}[1-9]
    |done\ request:.{0,120}\ 200|Finished\ request|\|\ 200\ \|""",
    re.VERBOSE,
)
"""A request was served."""

EFFECT = re.compile(
    r"""EngineDeadError|EngineCore\ (?:failed\ to\ start|encountered)|Engine\ core\ (?:initialization|proc).{0,20}(?:failed|died)|WorkerProc\ (?:hit|initialization|failed)
    |MQLLMEngine|AsyncEngineDeadError|AsyncLLM\ output_handler\ failed|Engine\ process\ failed|Background\ loop|[Ww]orker\ (?:process|proc|died)|ChildProcessError
    |failed\ to\ load\ (?:the\ )?model|exiting\ due\ to|Failed\ to\ (?:load\ model\ from\ file|create\ llama_context)|llama\ runner\ (?:process\ has\ )?terminated|runner\ process
    |Aborted|core\ dumped|terminate\ called|Traceback|Shard\ .{0,20}failed|ShardFailed|ShardCannotStart|Scheduler\ hit\ an\ exception|Rank\ \d+\ scheduler\ is\ dead|failed\ to\ create\ context|sigquit|Exception\ in\ ASGI""",
    re.VERBOSE,
)

BEFORE_READY = re.compile(
    r"""failed\ to\ start|[Ii]nitialization\ failed|exiting\ due\ to\ model\ loading\ error|failed\ to\ load\ (?:the\ )?(?:model|draft)|Failed\ to\ load\ model|error\ loading\ (?:model|llama)
    |Failed\ to\ create\ llama_context|failed\ to\ (?:create|initialize)\ (?:the\ )?context|Shard\ (?:\d+\ )?(?:failed|cannot)\ (?:to\ )?start|ShardCannotStart|Application\ startup\ failed|unable\ to\ load\ model|WorkerProc\ initialization\ failed|before\ ready""",
    re.VERBOSE,
)
AFTER_READY = re.compile(
    r"""EngineCore\ encountered|EngineDeadError|MQLLMEngine\ is\ already\ dead|AsyncEngineDeadError|output_handler\ failed|Background\ loop\ (?:has\ errored|is\ stopped|is\ not)
    |update_slots:\ .{0,40}(?:fail|error)|\b500\ Internal\ Server\ Error|ModelRunnerOutput|scheduled_new_reqs""",
    re.VERBOSE,
)


class Mark(IntEnum):
    """What a line may be beside, or instead of, the wording of an error."""

    HARMLESS = 0
    RECOVERY = 1
    EFFECT = 2
    BEFORE_READY = 3
    AFTER_READY = 4
    ANSWERED = 5


_MARKS = PatternTable([HARMLESS, RECOVERY, EFFECT, BEFORE_READY, AFTER_READY, ANSWERED])


def marks_of(text: str) -> frozenset[Mark]:
    return frozenset(Mark(index) for index in _MARKS.matches(text))


CHILD_EXIT = re.compile(
    r"""(?:Failed\ core\ proc\(s\):\ \{[^}]{0,200}?'[\w.-]+':\ (?P<core>-?\d+)
    |(?:exit\ ?code|exitcode|return\ ?code|exit\ status|exited\ with(?:\ code|\ status)?|died\ with(?:\ status)?|status\ code\ was)[^\w-]{0,4}(?P<code>-?\d+)
    |(?:signal|by\ signal|killed\ by|received|got)\W{0,3}\ ?(?P<name>SIG(?:KILL|SEGV|BUS|ILL|ABRT|TERM)|killed|segmentation\ fault|bus\ error|illegal\ instruction|aborted|terminated)\b
    |(?:terminated\ by|killed\ by|with|by)\ signal\W{0,3}(?P<number>\d+)
    |(?:^|\ )(?P<shell>Killed)(?:\ {2,}\S|\s*$)
    |code=killed,\ (?:status=)?(?P<systemd>\d+))""",
    re.VERBOSE,
)
_EXITS = PatternTable([CHILD_EXIT])
SIGNALS = {
    "sigkill": 9, "killed": 9, "sigsegv": 11, "segmentation fault": 11, "sigbus": 7, "bus error": 7, "sigill": 4,
    "illegal instruction": 4, "sigabrt": 6, "aborted": 6, "sigterm": 15, "terminated": 15,
}  # fmt: skip


def child_signal(text: str) -> int | None:
    """Give the signal that a log line says ended a process; None where it tells none."""
    match = CHILD_EXIT.search(text) if list(_EXITS.matches(text)) else None
    if match is None:
        return None
    groups = match.groupdict()
    if groups["shell"]:
        return 9
    if groups["name"]:
        return SIGNALS[groups["name"].lower()]
    if groups["number"] or groups["systemd"]:
        return int(groups["number"] or groups["systemd"])
    code = int(groups["core"] or groups["code"])
    if code < 0:
        return -code
    return code - 128 if 128 < code < 160 else None
