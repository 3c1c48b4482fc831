"""Wordings of everything that is not a failed allocation: nothing to degrade for, something to tell.

Ordered: the more particular before the more general.
"""

# ruff: noqa: E501 - a wording is kept on one line, so that it can be searched for

from __future__ import annotations

from kvguard.diagnosis.rule import Rule, Weight, rule
from kvguard.domain import Cause, Stage

_Q, _D, _C = Cause.QUANT_FORMAT_MISMATCH, Cause.DEPENDENCY_VERSION_MISMATCH, Cause.CORRUPT_MODEL
_M, _P, _G, _R = Cause.MISSING_FILE, Cause.PORT_IN_USE, Cause.DRIVER_ERROR, Cause.REQUEST_TOO_LONG
_LOAD, _WARM, _INF = Stage.LOAD, Stage.WARMUP, Stage.INFERENCE

REQUEST: tuple[Rule, ...] = (
    rule(_R, r"exceeds the (?:available|model'?s?|maximum|configured) context|maximum context (?:length|size) (?:is|of)|exceeds? (?:the )?(?:model'?s )?(?:maximum |max )?context (?:window|length|size)|longer than the (?:model's )?(?:maximum )?context|context_length_exceeded|exceed_context_size_error|(?:is|are) too (?:long|large) for .{0,30}context|exceeds .{0,40}context[ _](?:length|window|size)|context length is only \d+|maximum input length of", stage=_INF, any_level=True),
    rule(_R, r"(?:prompt|input|request)\b.{0,60}(?:longer than|exceeds?|greater than|too long).{0,60}(?:max\w*[ _-](?:model|seq\w*|input|allowed|total)[ _-]?(?:len\w*|tokens)?)", stage=_INF, any_level=True),
    rule(_R, r"\b(?:prompt|input|request|message)s?\b.{0,60}\b(?:is|are|was) too (?:long|big|large)|prompt too long|input too long|is too long and exceeds|too big compared to KV size", stage=_INF, any_level=True),
    rule(_R, r"`inputs`.{0,60}must (?:be <=|have less)|max_(?:new_|completion_)?tokens.{0,60}(?:is too large|must be (?:<=|at most|less))|(?:tokens|length).{0,60}exceeds?.{0,40}max_(?:input|total)_(?:length|tokens)", stage=_INF, any_level=True),
    rule(_R, r"(?:reduce the length of|shorten) (?:the|your) (?:messages|input|prompt)|reduce your prompt", stage=_INF, any_level=True),
    rule(_R, r"(?:input|prompt|request)\w*.{0,20} (?:length|tokens?|contains)\b.{0,60}(?:exceeds?|longer than|greater than|larger than|but the maximum|more than the).{0,80}|requested token(?:s| count)? .{0,60}exceeds?|(?:input|prompt) .{0,20}\(\d+ tokens\) .{0,20}(?:exceeds|is longer)", stage=_INF, any_level=True, sure=0.88),
    rule(_R, r"increase the physical batch size|requires n_ubatch >= n_tokens|GGML_ASSERT\(n_tokens\w* <= (?:cparams\.)?n_u?batch\)", stage=_INF, any_level=True),
)  # fmt: skip

PORT: tuple[Rule, ...] = (
    rule(_P, r"Address (?:already )?in use|Connection in use: |EADDRINUSE|port is already allocated|only one usage of each socket address|error while attempting to bind on address|\[?(?:Errno|WinError) 10048|\[Errno (?:98|48)\]", sure=0.96),
    rule(_P, r"(?:couldn't|could not|cannot|can't|failed to|unable to) bind\b|\bbind(?:\(\))? failed|bind: .{0,60}in use", sure=0.94),
    rule(_P, r"\bport \d+ (?:is )?(?:already )?(?:in use|taken|occupied|being used|not available|unavailable)|port already in use|\bport\b.{0,20}is in use by", sure=0.94),
    rule(_P, r"failed to listen on|unable to listen on", sure=0.9),
)  # fmt: skip

FILES: tuple[Rule, ...] = (
    # ---- corrupt
    rule(_C, r"(?:invalid|bad|wrong|unknown) (?:file )?magic|magic (?:number|characters?|bytes?) (?:mismatch|is wrong|invalid)|failed to read magic", stage=_LOAD),
    rule(_C, r"not within the file bounds|(?:model|file|checkpoint|archive|shard|header|gguf|blob|weights|data)\b.{0,40}\b(?:is |are |seems |may be |appears )?(?:corrupt(?:ed)?|incomplete|truncated)\b|corrupted model|truncated file|corrupt(?:ed)? (?:file|model|checkpoint|gguf|download)", stage=_LOAD),
    rule(_C, r"Error while deserializing(?: header)?|MetadataIncompleteBuffer|HeaderToo(?:Large|Small)|InvalidHeader\w*|IncompleteBuffer|SafetensorError: (?!.*No such file)|TensorInvalidInfo|InvalidOffset", stage=_LOAD),
    rule(_C, r"PytorchStreamReader failed|failed finding central directory|UnpicklingError|invalid load key|BadZipFile|invalid header or archive", stage=_LOAD),
    rule(_C, r"unexpected(?:ly)? (?:reached )?(?:end of (?:file|stream)|EOF)|\bEOFError\b|premature end of", stage=_LOAD, sure=0.85),
    rule(_C, r"(?:checksum|sha256|digest|hash)\w*\b.{0,40}(?:mismatch|does not match|did not match|failed|differs)|Consistency check failed", stage=_LOAD),
    rule(_C, r"failed to read (?:header|key-value|tensor (?:info|data)|the GGUF)|read error: |error reading (?:tensor|model)", stage=_LOAD, sure=0.85),
    rule(_D, r"wrong number of tensors|tensor '[^']+' has wrong shape|check_tensor_dims", stage=_LOAD, also=(_C, _Q), sure=0.75),
    rule(_C, r"tensor '[^']*' has invalid data|duplicated? tensor|tensors expected but \d+ found|found nan|GGUF data section.{0,40}not .{0,10}byte aligned", stage=_LOAD, also=(_D,)),
    rule(_C, r"missing tensor '|tensor '[^']+' not found", stage=_LOAD, also=(_D, _Q), sure=0.8),
    rule(_C, r"JSONDecodeError|(?:is not|isn't) (?:a )?valid JSON|Expecting value: line 1 column 1|expected value at line \d+ column \d+", stage=_LOAD, sure=0.8),
    rule(_C, r"encountered (?:length_error|bad_alloc error) while reading|has invalid GGUF type|invalid number of dimensions", stage=_LOAD),
    rule(_C, r"git[- ]lfs(?: pointer)?", stage=_LOAD, sure=0.85),
    rule(_C, r"(?:\[Errno 5\] )?Input/output error|\bI/O error\b|Stale file handle", sure=0.75, also=(_M,)),
    # ---- missing
    rule(_M, r"Repository Not Found|RepositoryNotFoundError|RevisionNotFoundError|(?:Local)?EntryNotFoundError|Entry Not Found|404 Client Error|Repo id must|Invalid repository ID|HFValidationError", stage=_LOAD),
    rule(_M, r"GatedRepoError|gated repo|40[13] Client Error|Access to model .{0,80}restricted", stage=_LOAD, also=(_C,)),
    rule(_M, r"not a valid model identifier|is not a local folder|Can't load (?:the )?(?:configuration|config|tokenizer|model|image processor|feature extractor)|does not appear to have (?:a |any )?files? named|Cannot find any model weights|no (?:model weights|safetensors weights?|\.?(?:bin|safetensors|gguf)(?: or \S+)? files?) found|file '.{1,200}' not found in repository|couldn't find .{0,80}(?:config\.json|model|cached files)|could not find (?:the )?model|cannot find the requested files|Error no file named|not available in cache", stage=_LOAD),
    rule(_M, r"outgoing traffic has been disabled|offline mode is enabled|couldn't connect to 'https?://huggingface|(?:huggingface\.co|hf\.co).{0,200}(?:Max retries exceeded|Failed to resolve|NameResolutionError|Temporary failure)|Max retries exceeded with url: /\S+/resolve/", stage=_LOAD),
    rule(_M, r"model path does not exist|model file .{0,120}(?:not found|does not exist|missing)|(?:model|file) '?\"?[^'\"]{0,200}'?\"? (?:not found|does not exist|doesn't exist)|no such model|try pulling it first|pull model manifest|file does not exist|Does this file exist|path .{0,200}does not exist|failed to download (?:model|file)|download failed", stage=_LOAD, sure=0.9),
    rule(_M, r"(?:failed to open|could not open|couldn't open|cannot open|unable to open|error opening)(?! shared object).{0,200}(?:\.gguf|\.safetensors|\.bin\b|\.json|\.pt\b|\.model\b|model|GGUF|No such file|Permission denied)(?!.{0,20}/dev/shm)", stage=_LOAD),
    rule(_M, r"(?:FileNotFoundError|No such file or directory|cannot find the (?:path|file) specified).{0,200}(?:gguf|safetensors|json|model|\.bin\b|\.pt\b|token)|(?:gguf|safetensors|json|models?|\.bin\b|\.pt\b|token\w*)\b.{0,200}(?:No such file or directory|cannot find the (?:path|file))|\bFileNotFoundError\b", stage=_LOAD),
    rule(_M, r"PermissionError\b|(?:gguf|safetensors|model\w*|\.json|\.bin)\b.{0,120}Permission denied|Permission denied.{0,120}(?:gguf|safetensors|models?/|\.json|\.bin)", stage=_LOAD, sure=0.85),
    rule(_M, r"No such file or directory|command not found", stage=_LOAD, weight=Weight.HINT, sure=0.6),
)  # fmt: skip

IMPORTS: tuple[Rule, ...] = (
    rule(_D, r"ModuleNotFoundError|No module named|cannot import name|\bImportError\b", stage=_LOAD),
    rule(_D, r"undefined symbol|version [`'\"]?(?:GLIBC|GLIBCXX|CXXABI)|(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+.{0,4}not found|DLL load failed|cannot open shared object file|error while loading shared libraries|Library not loaded|Symbol not found|procedure entry point", stage=_LOAD),
    rule(_D, r"in static TLS block", stage=_LOAD),
)  # fmt: skip

FORMAT: tuple[Rule, ...] = (
    rule(_Q, r"(?:unknown|invalid|unsupported|unrecognized) quant(?:ization|isation)?(?: (?:method|type|scheme|config|format))?|quantization (?:method|type|scheme|config)\b.{0,120}(?:not supported|does not match|unsupported|not match|mismatch|is invalid|not (?:yet )?implemented)|(?:not support|doesn't support|unsupported).{0,60}quantization (?:method|type|scheme)|No quantization config|Cannot find the config file for (?:awq|gptq|\w+)", stage=_LOAD),
    rule(_Q, r"not supported for quantization|(?:GPTQ|AWQ|FP8|FP4|NVFP4|MXFP4|INT8|INT4|bitsandbytes|marlin|exllama\w*|compressed-tensors|gguf|w4a16|w8a8)\b.{0,60}quantiz\w+.{0,60}(?:only supported|not supported|unsupported|requires|is only)|already quantized with|is not quantized|quantized (?:weight )?shape|quantized models? .{0,60}(?:only|not) supported|not aligned with the quantized", stage=_LOAD),
    rule(_Q, r"Tried to load weights of size|Attempted to load weight .{0,80}into parameter|size mismatch for|shape mismatch.{0,60}(?:weight|param|tensor|loaded)|(?:weight|param\w*|tensor)\b.{0,60}shape mismatch|loaded_weight\.(?:shape|size)", stage=_LOAD),
    rule(_Q, r"assert .{0,80}loaded_weight|param_data\.shape", stage=_LOAD, weight=Weight.HINT),
    rule(_Q, r"(?:KeyError|AttributeError|ValueError|RuntimeError|missing|unexpected|not found|no (?:module or )?parameter|weight)\b.{0,160}\b(?:qweight|qzeros|g_idx|\w*(?:weight|input|k|v)_scale\w*|weight_packed|weight_shape|absmax|quant_map|quant_state\w*|scales|wqkv|SCB)\b", stage=_LOAD),
    rule(_Q, r"KeyError: ['\"](?:[\w-]+\.){2,}\w+|KeyError: ['\"](?:model|layers|transformer|lm_head|blk)\.", stage=_LOAD, also=(_D, _C), sure=0.8),
    rule(_Q, r"There is no module or parameter named|weights were not initialized from checkpoint|(?:Unexpected|Missing) key\(s\) in state_dict", stage=_LOAD, also=(_D, _C), sure=0.8),
    rule(_Q, r"(?:invalid|unknown|unsupported) (?:ggml|tensor|quant(?:ization)?|gguf|cache|KV cache|weight)[ _]?(?:data)?[ _]?type|unsupported (?:GGUF|GGML) |tensor '[^']{1,200}' of type \w+.{0,40}not supported", stage=_LOAD, also=(_D,)),
    rule(_Q, r"cache type \w+ with block size|(?:K|V) cache (?:type|quantization)\b.{0,80}(?:does not divide|requires|not supported|unsupported)|kv[-_]cache[-_](?:d)?type\b.{0,80}(?:not supported|unsupported|invalid)", stage=_WARM),
    rule(_Q, r"(?:quantized V cache|V cache quantization) requires flash", stage=_WARM),
    rule(_Q, r"(?:not divisible by|is not a multiple of|not aligned with).{0,80}(?:group|block|pack|quant|tile|min_thread|weight)|(?:group_size|block_n|block_k|weight_block_size|input_size_per_partition|output_size_per_partition|output_partition_size|quantized weight shape)\b.{0,120}(?:divisible|aligned)", stage=_LOAD),
    rule(_Q, r"Unsupported dtype|cannot convert .{0,60}(?:dtype|tensor|quant|type)|Minimum capability: ?\d|(?:requires|only supported on|needs|with) .{0,60}compute capability|fp8e4\w+ not supported|(?:data ?type|dtype)\b.{0,60}(?:fp8|float8|int4|int8|fp4|e4m3|nf4).{0,60}not supported", stage=_LOAD, also=(_D,), sure=0.85),
    rule(_Q, r"(?:marlin|exllama\w*|compressed[-_]tensors|gptq\w*|awq\w*|bitsandbytes|mxfp4|nvfp4|\bnf4|load_in_[48]bit|\bfp8|torchao|hqq|aqlm|eetq)\b.{0,160}(?:not supported|does not support|doesn't support|unsupported|is not compatible|incompatible|not compatible|only supports?|only works|not implemented|no .{0,30}compatible scheme|requires .{0,30}(?:bits|group|capability|dtype|sm_?\d))|No .{0,40}compatible scheme (?:was )?found|only 4-?bit|Only (?:float16|bfloat16|fp16|symmetric)|bits? (?:is |are )?not supported", stage=_LOAD, also=(_D,), sure=0.85),
    rule(_Q, r"requires all the modules to be on GPU", stage=_LOAD, also=(Cause.WEIGHTS_DONT_FIT,), sure=0.75),
    rule(_Q, r"mat1 and mat2 shapes cannot be multiplied", sure=0.5, weight=Weight.HINT),
)  # fmt: skip

VERSIONS: tuple[Rule, ...] = (
    rule(_D, r"unknown (?:model )?architecture|Model architectures? .{0,120}(?:not supported|failed to be inspected|unsupported)|does not recognize this architecture|unsupported (?:model )?architecture|architecture .{0,60}(?:is |are )?not (?:yet )?supported", stage=_LOAD),
    rule(_D, r"model[ _]type\b.{0,120}(?:not recognize|does not recognize|not supported|unsupported|unrecognized|unknown)|(?:unrecognized|unknown|unsupported) model[ _]type|Unrecognized (?:model|configuration class)", stage=_LOAD),
    rule(_D, r"no kernel image is available|unsupported toolchain|Torch not compiled with|compiled without (?:GPU|CUDA|BLAS|support)|with CUDA capability sm_\d+ is not compatible|invalid device kernel image|device kernel image is invalid", also=(_G,), stage=_LOAD),
    rule(_D, r"driver version is insufficient|driver (?:on your system )?is too old|driver too old|requires? (?:a )?(?:newer|NVIDIA )?(?:NVIDIA |CUDA )?driver (?:version )?>?=?|unsatisfied condition: cuda ?>=", also=(_G,), stage=_LOAD),
    rule(_D, r"Illegal instruction|\bSIGILL\b", stage=_LOAD),
    rule(_D, r"binary incompatibility|compiled using NumPy 1|_ARRAY_API not found|compiled against (?:a different|API version|ABI)|incompatible (?:API|ABI) version|ABI (?:mismatch|incompatib)", stage=_LOAD),
    rule(_D, r"(?:requires?|need(?:s|ed)?|depends on)\b.{0,100}(?:transformers|torch|accelerate|bitsandbytes|auto-?gptq|gptqmodel|autoawq|flash[-_]attn|flashinfer|triton|tokenizers|numpy|pydantic|protobuf|sentencepiece|tiktoken|vllm|xformers|optimum|compressed[-_]tensors|mistral[-_]common|nccl|python|huggingface[-_]hub|safetensors|timm|einops)\b\s*(?:`|'|\")?\s*(?:(?:[><=~!]=?|version|library|package|to be installed|\d)|is (?:not )?(?:installed|required))|[Pp]lease (?:re)?(?:install|upgrade|update) .{0,60}(?:`|pip|version|transformers|accelerate|bitsandbytes|library|package|more recent|latest)|pip install (?:-U |--upgrade |-i )?\S+", stage=_LOAD, sure=0.85),
    rule(_D, r"VersionConflict|DistributionNotFound|PackageNotFoundError|version (?:mismatch|conflict)(?!.{0,40}NVML)|(?:mismatched|incompatible) versions?|\bis incompatible with (?:torch|transformers|numpy|cuda|vllm|python|the installed)", stage=_LOAD, sure=0.85),
    rule(_D, r"use a more up-to-date version|GGUF(?: file)?(?:v\d| is version| version)\b.{0,80}(?:no longer|only supports|supported|extremely large)|bad GGUF version|is no longer supported", stage=_LOAD, also=(_Q,)),
    rule(_D, r"unknown pre-tokenizer type|unknown (?:vision )?projector type|Tokenizer class \S+ does not exist|data did not match any variant of untagged enum|unknown tokenizer", stage=_LOAD),
    rule(_D, r"TypeError: .{0,120}unexpected keyword argument|AttributeError: (?:module|type object|'?\w*(?:Config|Tokenizer\w*|Model|Cache|Processor)'?) .{0,120}has no attribute|TypeError: .{0,80}missing \d+ required positional", stage=_LOAD, sure=0.8),
    rule(_D, r"error: (?:unrecognized arguments|invalid argument|unknown argument)|unrecognized option|no such option|unexpected argument '", stage=_LOAD, sure=0.85),
    rule(_D, r"Failed to infer device type|No platform detected|Device string must not be empty", stage=_LOAD, also=(_G,), sure=0.8),
    rule(_D, r"ninja: build stopped|Failed to find C compiler|CUDA_HOME (?:environment variable )?is not set|Could not find nvcc|Error building extension|Python\.h: No such file|unsupported GNU version|Unsupported gpu architecture|mismatches the version that was used to compile", sure=0.85),
    rule(_D, r"trust_remote_code=True|requires you to execute", stage=_LOAD, sure=0.75),
    rule(_D, r"^(?:\w+\.)*(?:AttributeError|NameError|NotImplementedError): ", weight=Weight.HINT, sure=0.5),
)  # fmt: skip

CRASHES: tuple[Rule, ...] = (
    rule(_G, r"illegal memory access|unspecified launch failure|device-side assert|misaligned address|uncorrectable (?:ECC|NVLink)|illegal (?:address|instruction) was encountered|invalid program counter|hardware stack error", sure=0.95),
    rule(_G, r"NVRM: Xid|\bXid\b ?(?:\(|\d)|fallen off the bus|GPU is lost|GPU has been lost|RmInitAdapter failed|NVRM: .{0,60}(?:fail|error)", any_level=True, sure=0.95),
    rule(_G, r"device (?:was )?lost|DEVICE_LOST|ErrorDeviceLost|context is lost|GPU (?:hang|recovery)|HW Exception by GPU|ring \w+ timeout|device (?:was )?(?:hung|removed)|DEVICE_REMOVED", sure=0.95),
    rule(_G, r"Memory access fault by GPU|Memory critical error by agent|HSA_STATUS_ERROR(?!_OUT_OF_RESOURCES)|HSA exception", sure=0.95),
    rule(_G, r"out of resource: (?:shared memory|threads|registers)|OutOfResources", also=(_Q,)),
)  # fmt: skip

DEVICE: tuple[Rule, ...] = (
    rule(_G, r"invalid device function", also=(_D,)),
    rule(_G, r"Could not initialize Tensile|rocBLAS error|HIPBLAS_STATUS_(?!ALLOC)|Cannot read \S*TensileLibrary", also=(_D,)),
    rule(_G, r"No CUDA GPUs are available|no CUDA-capable device|CUDA-capable device\(s\) is/are busy|(?:no|0) (?:\w+ )?(?:GPU|device)s? (?:found|detected|available)|GPU not found|could not select device driver|nvidia-container-cli: (?!.*cuda>=)|(?:Failed to initialize|Can't initialize) NVML|NVML: |NVML Shared Library Not Found|Driver/library version mismatch|couldn't communicate with the NVIDIA driver", stage=_LOAD, also=(_D,)),
    rule(_G, r"Found no NVIDIA driver|CUDA (?:driver )?initialization(?:: | failed| error)|[Ff]ailed to initialize CUDA|CUDA unknown error|system not yet initialized|forward compatibility was attempted|unexpected error from cudaGetDeviceCount", stage=_LOAD, also=(_D,)),
    rule(_G, r"CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_(?!ALLOC_FAILED)[A-Z_]+|cuDNN error", sure=0.85),
    rule(_G, r"(?:CUDA|ROCm|HIP|MUSA|XPU|SYCL|CANN)(?: driver| runtime)? (?:error|failure)[ :]+(?!out of memory|the resource allocation failed)[\w'\d(]|\b(?:CUDA|hip|cuda)_?(?:ERROR|Error)_?(?!_?OUT_OF_MEMORY|OutOfMemory|MemoryAllocation)[A-Z]\w+|Cuda failure (?:\d+ )?'(?!out of memory)|(?:ZE|UR|PI)_(?:RESULT_)?ERROR_(?!OUT_OF)[A-Z_]+|CUDA runtime error in (?!.*out of memory)", sure=0.85),
    rule(_G, r"CUDA error.{0,20}unknown error|peer access (?:is not supported|failed)", sure=0.85),
    rule(_G, r"NCCL (?:error|WARN).{0,100}(?:unhandled|system error|internal error|invalid usage|remote process|Cuda failure(?!.*out of memory)|[Cc]onnect\w* (?:refused|timed out|closed)|timeout)|nccl(?:UnhandledCuda|System|Internal|Remote)Error|Watchdog caught collective operation timeout|NVLink .{0,40}error", weight=Weight.HINT, sure=0.7),
    rule(_G, r"Segfault encountered|Segmentation fault|\bSIGSEGV\b|[Aa]ccess violation|0xC0000005|stack smashing", weight=Weight.HINT, sure=0.75),
    rule(_G, r"command buffer \d+ failed with status|kIOGPUCommandBufferCallbackError(?!OutOfMemory)|failed to create (?:command queue|pipeline state|library|Metal library)|Compiler (?:encountered|failed)|GPU (?:Timeout|Hang) Error", weight=Weight.HINT, sure=0.75),
    rule(_G, r"GGML_ASSERT\(|ggml_abort|fatal error - please provide|op not supported|unsupported op '", weight=Weight.HINT, sure=0.5),
    rule(_G, r"Expected all tensors to be on the same device|Remote RPC server crashed", weight=Weight.HINT, sure=0.45),
)  # fmt: skip
