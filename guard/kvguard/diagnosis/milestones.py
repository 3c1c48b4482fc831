"""Where in its life an engine is, read from its log.

A phase only orders what was seen; what it means for a failure is decided in `verdict`.
"""

# ruff: noqa: E501 - a wording is kept on one line, so that it can be searched for

from __future__ import annotations

import re
from enum import IntEnum

from kvguard.diagnosis.pattern_table import PatternTable
from kvguard.domain import Stage


class Phase(IntEnum):
    """Order of an engine's life. SERVING and IDLE alternate."""

    UNKNOWN = 0
    STARTED = 1
    LOADING = 2
    LOADED = 3
    READY = 4
    SERVING = 5
    IDLE = 6
    STOPPING = 7


_TABLE: tuple[tuple[Phase, str], ...] = (
    (Phase.IDLE, r"all slots are idle|Running: 0 reqs|entering sleeping|#running-req: 0\b"),
    (
        Phase.STARTED,
        r"vLLM API server version|Initializing (?:an LLM engine|a V1 LLM engine)|server_args=ServerArgs|"
        r"\bbuild: \d+ \([0-9a-f]{6,}\)|starting llama server|Starting (?:runner|shard download)|"
        r"ggml_\w+_init: found|ggml_vulkan: Found|main: (?:setting up|binding port)|\bArgs \{",
    ),
    (
        Phase.LOADING,
        r"Starting to load model|Loading (?:safetensors |pt )?(?:checkpoint shards|weights)|loading checkpoint shards|"
        r"Load weight begin|load_tensors: loading model tensors|load_model: loading (?:draft |mtmd )?model|"
        r"main: loading model|llama_model_loader: |llama_load_model_from_file: |Loading model weights|"
        r"loading model part|llm_load_tensors: ggml ctx|weights detected|Using V1 worker|Loading pipeline",
    ),
    (
        Phase.LOADED,
        r"(?:Model loading|Loading model weights|Loading weights) took|Load weight end|Time spent loading weights|"
        r"KV (?:self|buffer) size|kv buffer size|llama_kv_cache(?:_unified|_init)?: size|creating (?:non-)?SWA KV cache|"
        r"constructing llama_context|llama_(?:new_context_with_model|context): n_ctx\w*|n_ubatch +=|"
        r"(?:GPU|CPU) KV cache size|# (?:GPU|CUDA|cuda|CPU) blocks|Available KV cache memory|Memory profiling|"
        r"Capturing (?:CUDA|the model|batches|cudagraphs)|Capture (?:cuda graph|CUDA graph) begin|torch\.compile takes|"
        r"KV Cache is allocated|Memory pool end|alloc_compute_meta|warming up the model|Warming up model|"
        r"Shard ready|Compiling a graph|Loading drafter|Encoder cache will be initialized|Profiling |[Gg]raph capturing finished|init_device|loaded multimodal model",
    ),
    (
        Phase.READY,
        r"server is listening|model loaded$|main: model loaded|listening on http|Application startup complete|"
        r"The server is fired up and ready|Uvicorn running on|llama runner started|HTTP server listening|"
        r"initializing slots|load_model: initializing, n_slots|Starting vLLM API server|Connected$|"
        r"Invalid hostname, defaulting|init engine .* took",
    ),
    (
        Phase.SERVING,
        r"launch_slot_|srv +process_chun|processing image|image encoded|^slot +\w+: id|^srv +(?:get_availabl|prompt_save|update_slots|send_|log_server_r)\w*:|prompt processing|Llama\.generate|"
        r"Running: [1-9]\d* reqs|#running-req: [1-9]|Prefill batch|Decode batch|Received request|Added request|"
        r"\"POST /[\w/.-]+ HTTP|eval time =|POST /v1/|POST /api/(?:chat|generate)|generate\{|chat_completions\{|"
        r"send_error: task|Error in preprocessing prompt|prefill\{|decode\{|execute_model|update_slots: ",
    ),
    (
        Phase.STOPPING,
        r"Shutting down|Waiting for application shutdown|Received (?:SIGTERM|signal 15)|received signal SIGTERM|"
        r"SIGTERM received|cleaning up before exit|Graceful shutdown|signal=terminated",
    ),
)

_PHASES = PatternTable([re.compile(pattern) for _, pattern in _TABLE])


def phase_of(text: str) -> Phase:
    """Name the phase that a line marks; UNKNOWN for all others."""
    return next((_TABLE[i][0] for i in _PHASES.matches(text)), Phase.UNKNOWN)


_FRAMES: tuple[tuple[str, str], ...] = (
    (
        "kv",
        r"_?allocate_kv_cache\w*|initialize_kv_cache\w*|_reshape_kv_cache\w*|init_memory_pool|init_kv_cache|"
        r"CacheEngine|_init_cache|create_kv_buffer|_create_buffers|MHATokenToKVPool|MLATokenToKVPool|"
        r"llama_kv_cache\w*|initialize_cache",
    ),
    (
        "warmup",
        r"profile_run|determine_available_memory|determine_num_available_blocks|capture_model|_dummy_run|"
        r"_dummy_sampler_run|compile_or_warm_up_model|kernel_warmup|init_cuda_graphs|init_device_graphs|CudaGraphRunner|"
        r"capture_one_batch_size|warm_?up|estimate_max_batch|profile_cudagraph_memory|graph_reserve|sched_reserve|"
        r"profile_num_available_blocks|llama_init_from_model|run_warmup",
    ),
    (
        "load",
        r"load_model|load_weights|from_pretrained|get_model|_load_state_dict\w*|_load_pretrained_model|"
        r"dispatch_model|weight_loader|create_weights|process_weights_after_loading|load_checkpoint\w*|"
        r"initialize_model|llama_model_load\w*|load_tensors|load_state_dict|safe_open|set_module_tensor_to_device|"
        r"init_device|init_torch_distributed|create_engine_config|from_engine_args|_verify_quantization|"
        r"create_server_socket",
    ),
    (
        "forward",
        r"forward|\w*sdpa\w*|scaled_dot_product_attention|flash_attn\w*|compute_logits|embed_multimodal|"
        r"_?execute_mm_encoder|rms_norm|silu_and_mul|fused_moe\w*|fused_experts|sampler|apply_top_k\w*|all_?reduce\w*",
    ),
    (
        "inference",
        r"run_busy_loop|_process_engine_step|step_with_batch_queue|event_loop_\w+|forward_batch_generation|"
        r"process_batch_result|generate_stream|generate_token|Prefill|update_slots|llama_decode|run_engine_loop|"
        r"engine_step|_handle_process_request|model\.generate|ggml_cuda_compute_forward|"
        r"ggml_backend_\w+_(?:graph_compute|synchronize)|llama_graph_compute|process_ubatch|graph_compute\w*",
    ),
)
_FRAME_TABLE = PatternTable([re.compile(rf"\b(?:{names})\b") for _, names in _FRAMES])


def frame_of(text: str) -> str:
    """Name what a stack frame belongs to (kv, warmup, load, forward, inference), or nothing."""
    return next((_FRAMES[i][0] for i in _FRAME_TABLE.matches(text)), "")


_STAGE_OF_PHASE = {
    Phase.STARTED: Stage.LOAD,
    Phase.LOADING: Stage.LOAD,
    Phase.LOADED: Stage.WARMUP,
    Phase.READY: Stage.INFERENCE,
    Phase.SERVING: Stage.INFERENCE,
    Phase.IDLE: Stage.IDLE,
    Phase.STOPPING: Stage.IDLE,
}


def stage_of(phase: Phase) -> Stage | None:
    return _STAGE_OF_PHASE.get(phase)


_NAMED: tuple[tuple[str, Phase], ...] = (
    (r"decod|prefill|serving|generat|request|token", Phase.SERVING),
    (r"idle|sleep", Phase.IDLE),
    (r"ready|listening|serve", Phase.READY),
    (r"loaded|kv|warm|profil|capture|graph|context|compile", Phase.LOADED),
    (r"load|weight|shard|tensor", Phase.LOADING),
    (r"start|init|spawn|config|bind", Phase.STARTED),
)


def phase_named(milestone: str) -> Phase:
    """Read the name of a milestone as an adapter, or a person's context file, gives it."""
    low = milestone.lower()
    return next((phase for pattern, phase in _NAMED if re.search(pattern, low)), Phase.UNKNOWN)
