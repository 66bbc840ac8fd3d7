# SPDX-License-Identifier: Apache-2.0
"""How accelerators tell of a fault, of a full memory and of a late peer, outside of the exceptions of torch.

CUDA's and HIP's runtime in the words of any program that prints them; Ascend's CANN (HCCL), Intel's Level Zero and
oneCCL, Habana's Synapse, AWS's Neuron, Cambricon's and Moore Threads' runtimes, and XLA. Their words are pieces of rows
of the table of last words; a fault of a GPU's equal is of class ``cuda_error`` like it, of any maker.

Pure: patterns, as texts.
"""

# "CUDA error: x", "cuda runtime error (74) : x", "Cuda error a.cu:7 'x'", "CUDA Error 700 at"; none is no error.
GPU_ERROR = (
    r"\b(?:CUDA|[Cc]uda|HIP|[Hh]ip) ?(?:[Rr]untime |[Dd]river |[Kk]ernel |API )?[Ee]rror\b ?"
    r"(?:code )?(?:[:=]|\(?(?!0\b)\d|in |at |\S{1,200}:\d)"
    r"(?![ (]{0,3}(?:0\b|[Nn]o error|(?:cuda|hip)?[Ss]uccess|none\b))"
)
# What cudaGetErrorString() says, where it is like nothing else; programs print it without a word of CUDA.
GPU_TEXTS = (
    r"named symbol not found|misaligned address|the launch timed out and was terminated|hardware stack error"
    r"|too many resources requested for launch|peer access is not supported between these"
    r"|device kernel image is invalid"
    r"|CUDA driver version is insufficient|PTX was compiled with an unsupported toolchain|invalid program counter"
    r"|unsupported display driver / cuda driver|operation not supported on global/shared address space"
    r"|(?:CUDA|[Cc]uda|HIP) failure ?(?:\d|'|:|\S{1,200}:\d)"
    # Names of errors in a check of HIP's own: "guarantee(false && \"hipErrorNoBinaryForGpu: ...".
    r"|\bhipError(?!NotReady|PeerAccessAlreadyEnabled)[A-Z]\w{3,40}: "
)
# Names as their back ends of torch write them before "out of memory" and "error".
_NAMES = r"(?:NPU|MUSA|MLU|HPU|GCU|TPU|XPU|MPS backend|Neuron)"
FULL = (
    rf"\b{_NAMES} out of memory|PT_DEVMEM Allocation failed|(?:MODULE|DEVMEM).{{0,40}}[Aa]llocation failed for size"
    r"|\bNRT_RESOURCE\b|\bnrt_\w{2,40}:? status ?= ?4\b|ran out of memory trying to allocate"
    r"|UR_RESULT_ERROR_OUT_OF_RESOURCES"
    r"|\bE[A-Z]\d{4}: .{0,200}(?:[Mm]emory allocation (?:error|failed)|[Oo]ut of [Mm]emory|alloc device memory failed)"
    r"|\bEL0004\b|[Mm]alloc device memory failed"
)
FAULTY = (
    r"\b(?:UR|ZE)_RESULT_ERROR_[A-Z_]{3,60}|\bPI_ERROR_[A-Z_]{3,60}|level_zero backend failed with error"
    rf"|\b{_NAMES} (?:function |device |runtime |driver )?[Ee]rror: "
    r"|\b(?:aicore|aivec|AI ?Core|vector core) (?:exception|error)|\bNRT_(?:EXEC|HW|UNINITIALIZED|FAILURE)\w{0,40}"
    r"|\bnrt_\w{2,40}:? (?:failed|status ?= ?(?!0\b)\d)|\bMUSA_ERROR_[A-Z_]{3,60}|\bCN_ERROR_[A-Z_]{3,60}"
    r"|synDeviceAcquire\w{0,20} failed|(?:HBM|hbm) (?:multi[- ]?bit|uncorrectable) (?:ECC|ecc)"
    r"|\bsynStatus\b.{0,60}\b[Dd]evice (?:acquire|lost|reset|not)"
    # CANN's driver, operators and the process of its communication, each with a number of its own.
    r"|^E[JLZ]\d{4}: "
)
# What CANN writes on a rank that waited: for a notification, for a socket, for a link of another.
WAITED = (
    # 507048 and 107020: a stream whose notification of another rank never came.
    r"NPU (?:function )?error\b.{0,80}\berror code is (?:507048|107020)\b"
    r"|[Cc]ollective (?:call|op(?:eration)?)s? failed.{0,80}(?:reset|closed|refused|[Tt]imed? ?out)"
    r"|\bEI000[269]\b|Notify register (?:times out|has not received)|Getting socket times out"
    r"|hccl fftsplus task timeout|\bHCCL\b.{0,80}(?:[Tt]imed out|[Tt]imeout occurred)|HcclRemote\w{0,20}Error"
    r"|\bRuntimeError: Collective call returned error|\bhcclRemoteError|\bCCL_ERROR\b.{0,80}(?:peer|remote|timeout)"
)
# XLA's service below torch_xla and JAX, as gRPC tells of the other end: only in exceptions.
SERVICE_LOST = (
    r"^[\w.]{0,80}UnavailableError: .{0,400}(?:Collective ops is aborted|Socket closed|failed to connect to all addr)"
    r"|^(?:[\w.]{0,80}(?:XlaRuntimeError|JaxRuntimeError)|RuntimeError): (?:.{0,200}: )?"
    r"(?:UNAVAILABLE\b.{0,120}(?:Socket closed|[Cc]onnection (?:reset|refused|closed)|failed to connect"
    r"|recvmsg|GOAWAY)|Failed to meet rendezvous|Socket closed \(14\))"
)
