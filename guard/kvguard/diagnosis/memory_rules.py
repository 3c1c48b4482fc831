"""Wordings of failed allocations: which account did not fit, or which memory ran out.

Ordered: what names an account comes before what only says that memory is out.
"""

# ruff: noqa: E501 - a wording is kept on one line, so that it can be searched for

from __future__ import annotations

from kvguard.diagnosis.rule import Rule, Weight, rule
from kvguard.domain import Cause, Stage

_W, _K, _A = Cause.WEIGHTS_DONT_FIT, Cause.KV_DONT_FIT, Cause.ACTIVATION_PEAK
_H, _S, _O = Cause.HOST_RAM_OOM_KILLED, Cause.SHARED_MEMORY_SPILL, Cause.MEMORY_HELD_BY_OTHERS
_LOAD, _WARM, _INF = Stage.LOAD, Stage.WARMUP, Stage.INFERENCE

KERNEL: tuple[Rule, ...] = (
    # The kernel, the init system or the container runtime say that they killed for memory.
    rule(_H, r"(?:Memory cgroup out of memory|Out of memory)\W*(?:Kill(?:ed)? process|:.*Killed)", any_level=True, sure=0.97),
    rule(_H, r"\boom-kill\b|invoked oom-killer|oom_reaper: reaped|\bOOMKilled\b(?![\"']?\s*[:=]\s*false)|(?:killed|terminated) by the OOM[ -]?killer(?!.*\(2\))|result 'oom-kill'|\boom_kill [1-9]",
         any_level=True, sure=0.97),
    rule(_H, r"systemd-oomd.*[Kk]illed|[Kk]illed .*due to memory pressure|earlyoom.*(?:SIGTERM|SIGKILL|sending)|low memory! at or below|jetsam", any_level=True, sure=0.95),
    rule(_H, r"(?:node|worker)\b.*running low on memory|ray\.exceptions\.OutOfMemoryError", sure=0.95),
    rule(_H, r"was sent SIGKILL! Perhaps out of memory", sure=0.9),
    rule(_H, r"container .*(?:exceeded|reached) (?:its )?memory limit|exceed(?:ed|s) memory limit|memory limit (?:was )?exceeded", sure=0.85),
)  # fmt: skip

ACCOUNTS: tuple[Rule, ...] = (
    # ---- KV cache
    rule(_K, r"(?:failed|unable|could not|cannot|can't) (?:to )?(?:allocate|create|reserve)\b.{0,60}\bkv[ _-]?cache|llama_kv_cache(?:\w*)\(\) failed|kv[ _-]?cache\w* (?:allocation|initialization) failed", stage=_WARM),
    rule(_K, r"No available memory for the cache blocks|not enough (?:gpu )?memory .{0,40}(?:cache|kv) blocks", stage=_WARM),
    rule(_K, r"KV cache (?:memory )?(?:is )?needed, which is larger than|larger than the (?:available KV cache memory|maximum number of tokens that can be stored in KV cache)|KV cache .{0,40}(?:cannot|can't|does not|doesn't|not) (?:fit|hold|be allocated)|(?:not enough|insufficient|no enough|run out of) .{0,40}memory .{0,30}KV[ -]cache|KV cache size .{0,40}(?:exceeds|larger than|bigger than)|insufficient KV cache", stage=_WARM),
    rule(_K, r"estimated maximum model length is|max(?:imum)? ?seq(?:uence)? ?len \(\d+\) is larger than|max_(?:model|seq)_len .{0,60}(?:larger|greater) than .{0,60}(?:KV|cache)", stage=_WARM),
    rule(_K, r"Not enough memory.{0,40}--mem-fraction-static|(?:increase|raise) --mem-fraction-static|Not enough memory to handle .{0,40}(?:max_total_tokens|total tokens)|max_total_num_tokens\W{1,4}(?:0|-\d+)\b|decrease .?--max-(?:batch-)?total-tokens", stage=_WARM),
    rule(_K, r"Error in memory profiling", stage=_WARM, also=(_O,), sure=0.8),
    rule(_K, r"Free memory on device.{0,120}less than desired GPU memory utilization", stage=_LOAD, also=(_O, _W), sure=0.85),
    rule(_K, r"failed to (?:initialize|create) (?:the )?context: .{0,40}bad_?alloc", stage=_WARM, also=(_H,), sure=0.8),
    # A pool that is full while requests run.
    rule(_K, r"(?:Decode|Prefill) out of memory\. Try to lower|No enough memory for decode|failed to retract|retract(?:ed)? .{0,40}(?:failed|not enough)", stage=_INF),
    rule(_K, r"KV cache is full|could not find a KV (?:cache )?slot|failed to find KV cache slot|KV cache pool is full|failed to find (?:a memory slot|free space in the KV cache|(?:\d+ )?available cells in kv cache)|llama_decode(?:\(\))?:? (?:returned|failed[^-]{0,20}) 1\b|failed to decode the batch, n_batch = \d+, ret = 1\b|Context size has been exceeded",
         stage=_INF, weight=Weight.SPECIFIC, sure=0.85),
    rule(_K, r"(?:no|not enough|out of|insufficient) (?:more )?(?:free|KV|available) (?:KV )?(?:cache )?blocks", stage=_INF, sure=0.8),
    rule(_K, r"(?:failed|unable) to allocate .{0,40}(?:\brs cache|recurrent (?:state|cache|memory))", stage=_WARM),
    rule(_K, r"lack of (?:CPU )?swap space", stage=_INF),
    rule(_K, r"Too large swap space", stage=_LOAD, also=(_H,), sure=0.7),
    # ---- activations, compute buffers, graphs
    rule(_A, r"(?:kv_cache\w*update|K-?_?shift|memory update)\w*\b.{0,40}fail|failed .{0,40}(?:K-shift|memory update)", stage=_INF, also=(_K,)),
    rule(_A, r"Buffer overflow when allocating|AlignedAllocator|workspace .{0,60}(?:is locked|too small|not (?:large )?enough|insufficient)|increase .{0,30}workspace", sure=0.85),
    rule(_A, r"(?:clip_image_\w*encode|mtmd_encode\w*|encoder? (?:image|vision)).{0,60}(?:out of memory|alloc)", sure=0.8),
    rule(_A, r"(?:failed|unable) to (?:allocate|reserve) (?:\w+ )?(?:compute|output)(?: \w+)? (?:buffers?|graph)|failed to allocate compute|could not reserve space for batch", stage=_WARM),
    rule(_A, r"(?:graph_reserve|sched_reserve)\w*: failed|ggml_gallocr_reserve_n\w*: failed|failed to reserve (?:graph|worst-case|initial)", stage=_WARM),
    rule(_A, r"(?:out of memory|OOM)\b.{0,60}warm(?:ing|ed)?[ -]?up|warm(?:ing|ed)?[ -]?up.{0,120}(?:out of memory|\bOOM\b)", stage=_WARM),
    rule(_A, r"Not enough memory to (?:handle|run) .{0,40}prefill tokens", stage=_WARM),
    rule(_A, r"Capture CUDA graph failed.{0,60}memory|(?:out of memory|OOM)\b.{0,80}captur\w+ (?:the )?(?:cuda ?graph)|captur\w+ .{0,20}cuda ?graph.{0,80}out of memory", stage=_WARM),
    rule(_A, r"not enough space in the (?:context's memory pool|scratch memory)", stage=_INF, sure=0.75),
    rule(_A, r"in function ggml_backend_\w+_device_get_memory|^\s*(?:cuda|hip)MemGetInfo\(", stage=_LOAD, weight=Weight.HINT, also=(_W,), sure=0.7),
    # ---- weights
    rule(_W, r"error loading model: unable to allocate|unable to allocate (?:backend|\w+) buffer", stage=_LOAD),
    rule(_W, r"load(?:ing)? (?:the )?model\b.{0,40}not enough (?:GPU )?memory|not enough (?:GPU |device |video |system )?(?:memory|VRAM) to load|not enough VRAM|Insufficient VRAM|Insufficient GPU memory to load|enough GPU RAM to fit", stage=_LOAD),
    rule(_W, r"modules are dispatched on the CPU or the disk|trying to offload the whole model to the disk|device_map.{0,40}had weights offloaded to the disk", stage=_LOAD),
    rule(_W, r"Insufficient space in device allocation", stage=_LOAD),
    rule(_W, r"model requires more (?:system |GPU |video )?(?:memory|VRAM)|requires more (?:GPU )?memory .{0,30}than is available", stage=_LOAD, also=(_H,)),
    rule(_W, r"may not have enough (?:available )?(?:memory|VRAM|RAM) to (?:run|load)", stage=_LOAD, also=(_H,)),
    rule(_W, r"(?:model )?weights .{0,60}(?:do(?:es)? not|don't|doesn't|cannot|can't|will not|won't) fit|weights .{0,40}(?:exceed|larger than|bigger than) .{0,30}(?:memory|VRAM)", stage=_LOAD),
    rule(_W, r"model (?:weights )?(?:uses|takes|requires) .{0,60}more than .{0,40}gpu[-_]memory[-_]utilization", stage=_LOAD),
    rule(_W, r"ggml_backend_alloc_ctx_tensors\w* failed.{0,40}weights", stage=_LOAD),
)  # fmt: skip

HOST: tuple[Rule, ...] = (
    rule(_H, r"(?:failed to extend|could not create|unable to (?:open|write|resize|allocate|create)|No space left on device).{0,120}(?:/dev/shm|shared memory(?! \(on-chip)|\bshm\b)|(?:/dev/shm|\bshm\b|psm_\w+).{0,120}(?:No space left on device|too small|exhausted)|(?:workers? are |ran |run )?out of shared memory|insufficient shared memory \(shm\)|Error while creating shared memory segment", also=(Cause.DRIVER_ERROR,), sure=0.85),
    rule(_H, r"^Bus error|Bus error\.? (?:\(core dumped\)|It is possible that dataloader)|killed by signal: Bus error", weight=Weight.HINT, also=(Cause.CORRUPT_MODEL,), sure=0.5),
    rule(_H, r"ggml_backend_cpu_buffer_type_alloc_buffer: failed|ggml_aligned_malloc: insufficient memory|error: (?:posix_memalign|vm_allocate) failed", weight=Weight.GENERIC, also=(_H,)),
    rule(_H, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|enforce fail at alloc_cpu\.cpp|alloc_cpu\.cpp.{0,80}allocate memory", sure=0.88),
    rule(_H, r"std::bad_alloc|\bbad_alloc\b|\bbad allocation\b", sure=0.88),
    rule(_H, r"(?:^|[\s.])(?:numpy\S*)?_?(?:Array)?MemoryError\b", sure=0.88),
    rule(_H, r"Cannot allocate memory(?! in static TLS)|The paging file is too small|Not enough memory resources are available|not enough memory: you tried to allocate|\[Errno 12\]|os error (?:12|1455|8)\b", sure=0.85),
    rule(_H, r"Unable to allocate .{0,40}for an array with shape", sure=0.88),
    rule(_H, r"memory allocation of \d+ bytes failed", sure=0.88),
    rule(_H, r"fatal error: runtime: (?:out of memory|cannot allocate memory)|heap out of memory", sure=0.85),
    rule(_H, r"(?:cudaHostAlloc|cudaMallocHost|hipHostMalloc|cudaHostRegister)\b.{0,120}(?:out of memory|failed)", sure=0.75),
    rule(_H, r"OUT_OF_HOST_MEMORY|ErrorOutOfHostMemory", sure=0.8, also=(_A,)),
    rule(_S, r"device alloc .{0,40}failed, using host memory|(?:using|into|spill\w*|fell back|falling back) (?:to )?(?:shared (?:GPU|system) memory|sysmem)|system memory fallback (?:is )?(?:active|in use|engaged)|GTT .{0,40}(?:spill|evict)", any_level=True, sticky=True, sure=0.8),
    rule(_S, r"greater than the recommended max working set", any_level=True, weight=Weight.HINT, sticky=True, sure=0.6),
)  # fmt: skip

GENERIC: tuple[Rule, ...] = (
    rule(_A, r"failed to allocate (?:\S+ )?buffer(?: of size|, size)|buffer_type_alloc_buffer\w*: (?:allocating|failed)|alloc_tensor_range: failed|failed to allocate Metal buffer", weight=Weight.GENERIC),
    rule(_A, r"(?:cuda|hip|musa|aclrt)Malloc\w* failed(?:: out of memory)?", weight=Weight.GENERIC),
    rule(_A, r"\b(?:CUDA|HIP|ROCm|XPU|MUSA|NPU|MPS backend|TPU|device|GPU|VRAM)\b.{0,40}out of memory|out of memory.{0,60}\b(?:GPU|CUDA|device|VRAM)\b|Cuda failure (?:2 )?'?out of memory|CUDA driver error: out of memory|(?:cuda|cu|hip)\w+\b.{0,60}out of memory|RESOURCE_EXHAUSTED.{0,80}out of memory", weight=Weight.GENERIC),
    rule(_A, r"\bOutOfMemoryError\b|Tried to allocate [\d.]+ ?[KMGT]?i?B|Attempting to allocate \d+ bytes which is greater", weight=Weight.GENERIC),
    rule(_A, r"CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|cudaErrorMemoryAllocation|Error(?:_)?OutOfDeviceMemory|OUT_OF_DEVICE_MEMORY|(?:UR|PI)(?:_RESULT)?_ERROR_OUT_OF_RESOURCES|ErrorOutOfPoolMemory|CallbackErrorOutOfMemory|Insufficient Memory \(", weight=Weight.GENERIC, sticky=True),
    rule(_A, r"the resource allocation failed|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED.{0,60}cublasCreate|CL_MEM_OBJECT_ALLOCATION_FAILURE|HIPBLAS_STATUS_ALLOC_FAILED", weight=Weight.GENERIC),
    rule(_A, r"(?:can't|cannot|could not|unable to|failed to) allocate [\d.]+ ?(?:bytes|[KMG]i?B)\b.{0,40}(?:on )?(?:device|GPU|VRAM)?|Requested amount of GPU memory .{0,40}could not be allocated|Device memory allocation of size \d+ failed|could not allocate (?:device|GPU) memory", weight=Weight.GENERIC),
    rule(_A, r"Requested buffer size exceeds device", weight=Weight.GENERIC),
    rule(_A, r"GGML_ASSERT\((?:buffer|buf|ctx->mem_buffer|ptr|data) ?(?:!= ?(?:NULL|nullptr|0))?\) failed", weight=Weight.HINT, sure=0.5),
    rule(_A, r"\b(?:ran|runs|run) out of (?:GPU |device |video )?memory|\bout-of-memory\b.{0,30}(?:error|exception|occurred)", weight=Weight.GENERIC, sure=0.75),
)  # fmt: skip
