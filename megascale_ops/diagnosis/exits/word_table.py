# SPDX-License-Identifier: Apache-2.0
"""Last words: which fault each line of a dying rank means, its own or another rank's. One table, for lines and errors.

The agent matches the lines of a rank's stderr with it as they come, the judge of exits the end of stderr and the text
of the exception. So a text means the same wherever it was read.

The order matters: the first row that matches names the text. The specific stand before the general; memory and disk
before lost peers, for NCCL reports a full GPU as an error of its own; and a Python exception, whatever its text, last.

``VICTIM`` rows only show that *another* rank is gone or late. A survivor of a crash writes them, the culprit does not;
taking them for a cause would blame the victims. ``NOBODY`` rows show that torch ended the process itself and not why.
``HARMLESS`` rows look like last words and are none: healthy runs print them.

Each row names where the text comes from, so that the next release of that software can be compared with it. A test
holds a real line for each row, and a near miss that it must leave alone.
"""

from megascale_ops.diagnosis.exits import general_rows
from megascale_ops.diagnosis.exits.device_words import FAULTY, FULL, GPU_ERROR, GPU_TEXTS, SERVICE_LOST, WAITED
from megascale_ops.diagnosis.exits.translated_errors import IS_ABORTED, IS_KILLED, IS_SEGFAULT, NO_MEMORY, NO_SPACE
from megascale_ops.diagnosis.exits.word_rows import ENDED_BY, ENDED_WITH, HARMLESS, NOBODY, Row, cause, victim

GPU_WAIT = "gpu_wait"  # kernels that waited for another rank and trapped: CUDA's error behind it is a consequence
RENDEZVOUS_CLOSED = "rendezvous_closed"  # found so by agents; torch closes it at every end of one but by a signal
_OUT_OF = "out_of_memory"
PATTERNS: tuple[Row, ...] = (
    # None at all.
    Row(
        "tuner_limit",
        r"\bout of resource\b|OutOfResources|No valid triton configs",
        "exception",
        "Triton and inductor while they tune: a candidate wants more shared memory or registers than there are",
        HARMLESS,
    ),
    Row(
        "chatter",
        r"^\[W[^\]]{0,60}socket\.cpp|[Ff]ailed to check the .?should dump",
        "exception",
        "torch's c10d while a store is not there yet, and when rank 0 has ended in order before the others",
        HARMLESS,
    ),
    # What an overlapped kernel raises on all ranks that waited; ``tile_timeouts`` reads for which rank.
    victim(
        "tile_timeout",
        r"^(?:[\w.]{1,80}\.)?TileTimeout: ",
        "megascale_kernels, on every rank that waited for a tile that never came",
        in_traceback=True,
    ),
    victim(
        "kernel_mismatch",
        r"^(?:[\w.]{1,80}\.)?RankMismatch: ",
        "megascale_kernels, on every rank when two of them run different kernels",
        in_traceback=True,
    ),
    # The data that ranks exchanged does not fit.
    cause(
        "gloo_mismatch",
        r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size",
        "collective_mismatch",
        "Gloo's pair.cc, on a rank that was sent more than it expects: it aborts, though a peer called it otherwise",
    ),
    cause(
        "nccl_mismatch",
        r"collective mismatch error, local size \d+ remote size|Message truncated ?: received \d+ bytes instead of",
        "collective_mismatch",
        "NCCL's net_ib.cc and socket transport, on a rank that was sent more than it expects; a plugin says so too",
    ),
    cause(
        "checked_mismatch",
        r"Detected mismatch between collectives on ranks|appears not to match sizes of the same param"
        r"|Mismatched collective detected|DDP expects same model across all ranks"
        r"|due to shape mismatches\. All shapes across devices",
        "collective_mismatch",
        "torch with TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP's check of its parameters, accelerate's debug mode",
    ),
    # Out of memory. Before CUDA errors, NCCL's and lost peers: a full GPU is reported as each of them.
    cause(
        "cuda_out_of_memory",
        # Not as a sentence mentions it: "on OutOfMemoryError".
        r"(?:CUDA|HIP|XPU) out of memory|(?<![a-z,] )OutOfMemoryError"
        r"|(?:[Cc]aught|[Rr]aised?|[Gg]ot|[Tt]hrew|OutOfMemoryError(?=: )) ?(?:OutOfMemoryError|(?<=: ))"
        rf"|{GPU_ERROR}.{{0,200}}\bout of memory"
        r"|OUT_OF_(?:DEVICE|HOST)_MEMORY|CUDA allocation failed"
        r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"
        r"|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
        rf"|[Cc]uda failure (?:\d+ )?'out of memory'|OOM when allocating tensor|{FULL}",
        _OUT_OF,
        "torch's CUDACachingAllocator, the CUDA runtime, its libraries, NCCL, oneCCL, DALI, XLA, TensorFlow and other "
        "makers' back ends when the accelerator's memory is full",
    ),
    cause(
        "oom_killer",
        r"Out of memory: Kill(?:ed)? process \d+|\bKilled process \d+,? (?:\(|UID )|oom-kill:"
        r"|oom_reaper: reaped process"
        r"|[Mm]emory cgroup out of memory|[Dd]etected \d+ oom[-_ ]kill"
        r"|OOMKilled|OOM Killed|srun: error: [^:]{1,80}: tasks? [\d,\[\]-]{1,80}: Out Of Memory"
        r"|[Ee]xceed(?:s|ed|ing) (?:(?:its|the|job|step|\d+ ?%) )?memory (?:limit|budget|usage threshold)\b"
        r"|systemd-oomd(?:\[\d+\]:)? [Kk]illed |Failed with result 'oom-kill'"
        r"|\bsending SIG(?:TERM|KILL) to process \d+ .{0,80}\b(?:oom_score|badness)\b"
        r"|(?:has|have) been killed by the (?:OOM killer|cgroup out-of-memory handler)"
        r"|[Nn]ode (?:was|is|running) low on (?:resource: )?memory|PBS: job killed: \w?mem |exitStatus: -10[34]\b"
        r"|beyond (?:the )?(?:physical |virtual )?memory limits?\b|exceeds job \w+ limit \"\w_(?:vmem|rss)",
        _OUT_OF,
        "the kernel's OOM killer (mm/oom_kill.c), systemd-oomd and earlyoom, the reports of them by slurmstepd, srun, "
        "Kubernetes (evictions too), Ray and systemd; PBS, Grid Engine and YARN where they measure a job's memory",
    ),
    cause(
        "shm_full",
        r"insufficient shared memory \(shm\)|out of shared memory|/dev/shm.{0,120}No space left on device"
        r"|unable to (?:write to|allocate|resize) (?:file|shared memory)[^:]*/torch_"
        r"|creating shared memory segment|failed to extend /dev/shm/nccl",
        _OUT_OF,
        "torch's DataLoader, its shared-memory manager and NCCL's shm transport when /dev/shm is full",
        hint="the shared memory of its host or container is full",
    ),
    cause(
        "locked_memory",
        r"Call to ibv_\w+ failed with error Cannot allocate memory"
        r"|(?:NET/IB|NET/OFI|fi_mr_reg).{0,160}Cannot allocate memory",
        "nccl_error",
        "NCCL's ibvwrap.cc and its plugins where memory cannot be registered: errno ENOMEM, and no memory is short",
        hint="its limit of locked memory is too low: `ulimit -l` in its container or unit",
    ),
    cause(
        "host_out_of_memory",
        r"^MemoryError\b|std::bad_alloc|Cannot allocate memory|DefaultCPUAllocator: .*memory"
        r"|numpy\._core\._exceptions\._ArrayMemoryError|ArrayMemoryError: Unable to allocate"
        r"|memory allocation of \d+ bytes failed|[Oo]ut of host memory|cudaHostAlloc.{0,40} (?:2$|failed|memory)"
        rf"|{'|'.join(NO_MEMORY)}",
        _OUT_OF,
        "CPython, libstdc++, errno ENOMEM (also as glibc translates it), torch's CPU allocator, numpy, Rust and "
        "CUDA's pinned memory when host memory or an rlimit is reached",
    ),
    cause(
        "raised_out_of_memory",
        r"^(?!(?:Index|Key|Type|Attribute|Name)Error: ).*(?:MemoryError|\b[Oo]ut of memory\b|bad_alloc"
        r"|(?:RESOURCE_EXHAUSTED|ResourceExhausted)(?!.{0,80}(?:message larger|[Qq]uota|[Rr]ate)))",
        _OUT_OF,
        "any library's exception that says so: RESOURCE_EXHAUSTED, a wrapped MemoryError; not what Python raises of an "
        "index or a name, whatever that name is",
        in_traceback=True,
    ),
    # A data loader's worker died: its rank raises, and is no rank that failed by itself.
    cause(
        "loader_killed",
        r"DataLoader worker \(pid[^:]{1,80} is killed by signal: Killed",
        "killed",
        "torch's DataLoader: SIGCHLD told it that one of its workers was killed",
        sure=0.9,
        hint="a worker of its data loader was killed; the usual sender is the kernel's out-of-memory killer",
    ),
    general_rows.LOADER_STOPPED,
    cause(
        "loader_died",
        r"DataLoader worker \(pid\(s\) [\d, ]{1,80}\) exited unexpectedly(?! with exit code)",
        "killed",
        "torch's DataLoader, when its queue stays empty and a worker is gone",
        sure=0.7,
        hint="a worker of its data loader is gone; mostly for want of memory",
    ),
    # Disk.
    cause(
        "disk_full",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|StorageFull"
        r"|database or disk is full|low on resource: ephemeral-storage|ephemeral.{0,40} storage usage exceeds"
        r"|ost_write failed with -(?:28|122)\b"
        rf"|{'|'.join(NO_SPACE)}",
        "disk_full",
        "errno ENOSPC and EDQUOT, in C, in Python and in Rust (safetensors), and as glibc translates ENOSPC; SQLite, "
        "Lustre and Kubernetes in words of their own",
    ),
    cause(
        "torch_writer",
        r"PytorchStreamWriter failed writing|unexpected pos \d+ vs\.? \d+|inline_container\.cc:\d+\] "
        r".{0,80}write failed|basic_ios::clear: iostream error",
        "disk_full",
        "torch.save's zip writer, which passes no errno on: short writes of a full disk, a quota, a failing storage",
        sure=0.75,
        hint="the disk is full or over its quota, or the storage failed; torch's writer does not tell which",
    ),
    *general_rows.NO_FAILURE_OF_A_PROCESS,
    # Another rank is gone. Before CUDA's and NCCL's errors: these lines carry their words too.
    victim(
        "gloo_peer_closed",
        r"gloo/.*(?:Connection closed|Connection reset|Broken pipe|Socket closed|Read error)",
        "Gloo's pair.cc, 13 to 27 ms after a peer's process has died; seen on every survivor (torch 2.13)",
    ),
    victim(
        "gloo_timeout",
        r"Timed out waiting \d+ ?ms for (?:recv|send) operation|gloo.*(?:[Ww]ait timeout|[Tt]imed out|[Tt]imeout)",
        "Gloo's unbound_buffer.cc when a peer did not answer within the process group's timeout: it is frozen or slow",
    ),
    victim(
        "gloo_connect",
        r"connectFullMesh failed|gloo/.*(?:Connection refused|connect)",
        "Gloo while it builds its mesh: a peer that should listen does not (torch 2.13)",
    ),
    victim(
        "ib_completion",
        r"NET/IB\w? ?: ?.{0,40}[Gg]ot completion .{0,120}(?:status=|error )\S{0,30}\d|IBV_WC_\w+_ERR"
        r"|NET/IB ?: .{0,60}async event ?: port error|Call to ibv_modify_qp\w* failed with error Connection timed out",
        "NCCL's net_ib.cc: the other end of a queue pair does not answer; its process, its port or the way there",
    ),
    victim(
        "ucx_peer",
        r"\bib_mlx5_log\.c:\d{1,5}\b.{0,40}(?:Transport retry count exceeded|RNR (?:NAK )?retry)"
        r"|\bUCX +ERROR .{0,200}(?:Endpoint timeout|Connection reset by remote peer|keepalive)",
        "UCX below MPI, NIXL and NVSHMEM: the other end of a queue pair does not answer",
    ),
    victim(
        "nccl_remote",
        r"ncclRemoteError|remote process (?:exiting|exited)|Connection closed by remote peer"
        r"|[Ss]ocket (?:recv|send) failed|socketProgress\w*: |NCCL WARN \[Service thread\] (?:Could not|Error)"
        r"|Call to (?:recv|send|connect|poll)\b.{0,80}(?:failed|returned)"
        r"|socket\w{0,20}[Cc]onnect\w{0,10}: .{0,80}(?:failed|refused|timed out|returned|unreachable|[Nn]o route)",
        "nccl.h and NCCL's socket.cc: a peer exited or the network to it failed",
    ),
    victim(
        "nccl_timeout",
        r"[Cc]aught collective operation timeout|collective operation timeout: WorkNCCL|timed out in blocking wait"
        r"|Timeout at NCCL work",
        "torch's ProcessGroupNCCL watchdog: this rank waited; the one it waited for is to blame",
    ),
    victim("nccl_watchdog", r"\(either an error or timeout\) detected by watchdog at work", "its second line, alone"),
    victim(
        "nccl_dump",
        r"dump signal due to a collective timeout from|dump signal from another rank|global timeout (?:signal )?from",
        "torch's ProcessGroupNCCL, on ranks that another rank's time-out has told to dump and to end",
    ),
    victim(
        GPU_WAIT,
        r"CUDASymmetricMemory::\w{1,40}: rank \d{1,9} failed to (?:receive|send) signal"
        r"|\bDeepEP (?:error: timeout|timeout check failed|[\w ()]{1,60} timeout,)",
        "torch's symmetric memory and DeepEP: a kernel or its host gave up waiting for another rank and trapped, which "
        "CUDA then reports as a launch failure",
    ),
    victim(
        "jax_peer",
        r"(?:JAX distributed|[Cc]oordination) service detected (?:fatal errors|an error)|another task died"
        r"|tasks? (?:is|are) unhealthy \(stopped sending heartbeats\)|/task:\d{1,9} heartbeat timeout"
        r"|DEADLINE_EXCEEDED: Barrier timed out|[Cc]oordination service agent is in ERROR"
        r"|to join the rendezvous, but not all of them arrived|^F.{0,120}Termination timeout for `"
        r"|DEADLINE_EXCEEDED: GetKeyValue\(\) timed out|[Ff]ailed to \w+ .{0,60}from coordination service: UNAVAILABLE",
        "JAX's coordination service, which ends all processes but the one that it hears no more of or waits for",
    ),
    victim(
        "other_peer",
        WAITED,
        "Ascend's HCCL and oneCCL on a rank that waited for another",
    ),
    victim(
        "xla_service",
        SERVICE_LOST,
        "XLA's clients when the process or the service at the other end has gone",
        in_traceback=True,
    ),
    victim(
        "tf_collective",
        r"BaseCollectiveExecutor::StartAbort (?:UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED|ABORTED)\b",
        "TensorFlow's collectives when a task does not answer; a wrong argument is told by another status",
    ),
    victim(
        "nccl_aborted",
        r"NCCL communicator was aborted|NCCL communicator encountered error set by ProcessGroupNCCL"
        r"|ProcessGroup.{0,80}(?:aborted|shut ?down)",
        "torch's ProcessGroupNCCL, on ranks whose communicator was torn down after another one's error",
    ),
    victim(
        "monitored_barrier",
        r"failed to pass monitoredBarrier|successfully reached monitoredBarrier, but|timed out in monitoredBarrier",
        "torch's ProcessGroupGloo: rank 0 names who did not come in time, the others tell that they did (torch 2.13)",
    ),
    general_rows.PORT_TAKEN,
    general_rows.NOT_BUILT_IN,
    general_rows.NO_ADDRESS,
    victim(
        "mpi_daemon_lost",
        r"\b(?:ORTE|PRTE|PRRTE) has lost communication with a remote daemon",
        "Open MPI's launcher, when a node or the way to it is gone",
    ),
    victim(
        "rpc_peer",
        r"this error originated at tensorpipe/",
        "TensorPipe below torch's RPC: the worker at the other end is gone",
        in_traceback=True,
    ),
    victim(
        "horovod_peer",
        r"Horovod has been shut down\. This was caused by an exception on one of the ranks|HorovodInternalError: ",
        "Horovod on all ranks but the one that failed",
    ),
    victim(
        RENDEZVOUS_CLOSED,
        r"^(?:[\w.]{1,80}\.)?RendezvousClosedError\b",
        "torch's agent, where another one had closed the rendezvous as it ended, in order or by a failure",
        in_traceback=True,
    ),
    victim(
        "store_lost",
        r"Dist(?:Store|Network)Error|TCPStore.{0,200}(?:failed|timed out|[Bb]roken pipe)|store->get\("
        r"|(?:recvValue|recvValueWithTimeout|sendBytes) failed on|wait timeout after \d+ ?ms, keys:"
        r"|Stop_waiting response|Timed out initializing process group|Rendezvous(?:Connection|Closed|Timeout)Error",
        "torch's TCPStore: the rank or node that serves it has gone, or a rank it should hear of never came",
    ),
    victim(
        "torch_peer",
        r"(?:^|\(from )(?:RuntimeError|torch\.[\w.]+): (?:Connection (?:closed|reset) by peer|Connection refused"
        r"|Read error|Broken pipe|Socket Timeout|Timed out waiting\b|[Ff]ailed to recv|[Ff]ailed to connect"
        r"|Timeout waiting for key|Work ran time ?out|wait timeout)(?=$|[.,:(\[)]| to | \d| after )",
        "torch's own exceptions that say no more; the same words in another library's are of a connection of its own",
        in_traceback=True,
    ),
    Row(
        "nccl_stuck",
        r"watchdog got stuck for|due to ProcessGroupNCCL watchdog hang|[Hh]eartbeat monitor timed out",
        "unknown",
        "torch's heartbeat monitor: its watchdog hangs in CUDA or waits for the GIL, which can be anybody's doing",
        NOBODY,
        sure=0.3,
    ),
    Row(
        "nccl_teardown",
        r"Some NCCL operations have failed or timed out|taking the entire process down"
        r"|attempting to dump debug info, due to",
        "unknown",
        "torch's ProcessGroupNCCL before it ends the process, whatever the reason was",
        NOBODY,
        sure=0.3,
    ),
    # GPU and its driver.
    cause(
        "xid",
        r"\bS?Xid \((?:PCI:)?[0-9a-fA-F:.]+\): \d+|GPU has fallen off the bus|amdgpu: +Process .{1,64} pid \d",
        "cuda_error",
        "NVIDIA's and AMD's drivers in the kernel's log, where a console or a log shipper mixes them into stderr",
    ),
    cause(
        "cuda_node",
        r"Error 80[234]: |system not yet initialized|uncorrectable (?:ECC|NVLink|memory) error"
        r"|[Cc]uda failure (?:\d+ )?'unc|no CUDA-capable device is detected|CUDA-capable device\(s\) is/are busy"
        r"|CUDA unknown error|GPU is lost|Failed to initialize NVML|nvml error: "
        r"|[Uu]nable to determine the device handle for"
        r"|\bcuInit failed\b|NVIDIA Driver is present, but CUDA failed to initialize"
        r"|CUDA driver initialization failed|No visible GPU devices|no supported devices found for platform"
        r"|[Ff]ound no NVIDIA driver|NVIDIA driver on your system is too old"
        r"|NVMLError_(?:Unknown|DriverNotLoaded|LibRmVersionMismatch|GpuIsLost|IrqIssue)\b"
        r"|cudaErrorSystemNotReady|cudaErrorECCUncorrectable|cudaErrorDevicesUnavailable|CUDA_ERROR_SYSTEM_NOT_READY",
        "cuda_error",
        "the CUDA runtime and NVML, of what no script can cause: 802 is an NVSwitch system whose fabric manager does "
        "not run",
        hint="a fault of the node (its GPU, its driver or its fabric manager) and not of the script",
    ),
    cause(
        "cuda_error",
        rf"{GPU_ERROR}|{GPU_TEXTS}|{FAULTY}"
        r"|cudaError[A-Z]\w+|CUDA_ERROR_[A-Z]\w+|device-side assert"
        r"|(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_(?!SUCCESS)[A-Z]\w+|AcceleratorError|\bCuda(?:API)?Error: "
        r"|\bcu(?:DNN|FFT|BLAS|SOLVER|SPARSE)(?: [Ff]rontend)? [Ee]rror: "
        r"|\.cu:\d+: .{0,160}Assertion `"
        r"|no kernel image is available for execution|an illegal (?:memory access|instruction) was encountered"
        r"|unspecified launch failure|Memory access fault by GPU node|Triton Error \[(?:CUDA|HIP)\]: "
        r"|Error 101: invalid device ordinal|No (?:CUDA|HIP) GPUs are available"
        r"|HW Exception by GPU node|HSA_STATUS_ERROR_[A-Z]\w+",
        "cuda_error",
        "torch's C10_CUDA_CHECK, the CUDA driver's and runtime's error names and texts, the CUDA libraries' status "
        "names, Triton's driver, ROCm's runtime, and the like of other makers",
    ),
    cause(
        "nccl_usage",
        r"ncclInvalid(?:Argument|Usage)|Duplicate GPU detected",
        "nccl_error",
        "nccl.h: ranks that share a GPU, or a call with wrong arguments",
    ),
    cause(
        "nccl_error",
        r"Call to ibv_\w+ failed|NCCL WARN .{0,40}no socket interface found"
        r"|nccl(?:System|Internal|UnhandledCuda)Error|DistBackendError"
        r"|[NR]CCL [Ee]rror(?!s?:? ?(?:0|[Nn]one)\b)(?! (?:and|or|is|as|when|hand\w+|count)\b|s|,)|[NR]CCL failure",
        "nccl_error",
        "nccl.h's result names, what its transports lack, and torch's DistBackendError",
        weak=True,
        sure=0.7,
    ),
    # How a process was ended by the kernel or by itself.
    cause(
        "child_segfault",
        r"Signal (?:11|7|4) \(SIG(?:SEGV|BUS|ILL)\) received by PID|[Ee]xit ?code *: -(?:11|7|4)\b"
        r"|Signals\.SIG(?:SEGV|BUS|ILL)|return code = -(?:11|7|4)\b|signal: (?:segmentation fault|bus error)\b"
        rf"|{ENDED_WITH}13[2569]\b|{ENDED_BY}(?:11|7|4|8)\b",
        "segfault",
        "torchrun, deepspeed, subprocess, Go programs, time(1) and kubectl below a rank, of the process that they "
        "started",
        hint="so says a launcher below the rank",
    ),
    cause(
        "child_killed",
        r"Signal 9 \(SIGKILL\) received by PID|[Ee]xit ?code *: -9\b|Signals\.SIGKILL|return code = -9\b"
        rf"|terminated with signal SIGKILL|signal: (?:killed\b|9 \(SIGKILL\))|{ENDED_WITH}137\b|{ENDED_BY}9\b"
        r"|SIGKILL\(-9\)|^srun: error: [^:]{1,80}: tasks? [\d,\[\]-]{1,80}: Killed",
        "killed",
        "torchrun, deepspeed, spawn, subprocess, Go and Rust programs below a rank, of the process that they started",
        sure=0.85,
        hint="so says a launcher below the rank; the usual sender is the kernel's out-of-memory killer",
    ),
    cause(
        "child_aborted",
        r"Signal 6 \(SIGABRT\) received by PID|[Ee]xit ?code *: -6\b|Signals\.SIGABRT|return code = -6\b"
        rf"|signal: aborted\b|terminated with signal SIGABRT|{ENDED_WITH}134\b|{ENDED_BY}6\b",
        "aborted",
        "torchrun, deepspeed, subprocess and Go programs below a rank, of the process that they started",
        hint="so says a launcher below the rank",
        weak=True,
    ),
    general_rows.POISONED_PAGE,
    cause(
        "segfault",
        r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction)|Segmentation fault"
        r"|signal(?:: | )(?:SIGSEGV|SIGBUS|SIGILL|SIGFPE|11 )|Bus error"
        r"|(?:Illegal instruction|Floating point exception) \("
        rf"|^(?:zsh|fish|ksh|csh): (?:segmentation fault|bus error)|{IS_SEGFAULT}"
        r"|AddressSanitizer: SEGV\b|^#  SIG(?:SEGV|BUS|ILL) \(0x"
        r"|\*\*\* SIG(?:SEGV|BUS|ILL|FPE)\b.{0,40} received|\w\[\d+\]:? (?:segfault at|general protection fault)",
        "segfault",
        "CPython's faulthandler, the shell, torch's DataLoader, glibc's catchsegv, the handlers of absl and glog, the "
        "kernel's log, Java's VM, AddressSanitizer",
        late=True,
    ),
    cause(
        "heap",
        r"double free or corruption|corrupted (?:size vs\. prev_size|double-linked list)"
        r"|^(?:\S{1,80}: )?(?:free|[a-z]{0,2}m?alloc|realloc|malloc_consolidate|unlink_chunk|munmap_chunk|mremap_chunk"
        r"|_int_\w{1,20})\(\): \w"
        r"|\*\*\* [a-z-]+(?: [a-z-]+){0,4} detected \*\*\*: terminated|^pure virtual method called"
        r"|Assertion [`'].*' failed",
        "aborted",
        "glibc's checks of heap, stack and buffers, assert.h and libstdc++",
        late=True,
    ),
    cause(
        "aborted",
        r"Fatal Python error: |terminate called (?:after throwing|without an active)|Aborted +\(|^Aborted$"
        r"|^libc\+\+abi: terminating|^(?:zsh|fish|ksh|csh): abort"
        r"|^F(?:\d{4} | external/).{0,200}\] Check failed: |^panic: (?:runtime error|\w)|^thread '.{0,80}' panicked at "
        rf"|is killed by signal: Aborted|\*\*\* SIGABRT\b.{{0,40}} received|Trace/breakpoint trap \(|{IS_ABORTED}",
        "aborted",
        "CPython's fatal errors, libstdc++'s terminate, the shell, the handlers and checks of absl and glog, Go, Rust",
        weak=True,
    ),
    cause(
        "cancelled",
        r"slurmstepd\S{0,80}: error: \*\*\* (?:JOB|STEP) .{0,80}CANCELLED|DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)"
        r"|^Terminated$|:(?: line \d+:)? +\d+ Terminated\b"
        r"|got signal: (?:1|2|15)\b|Signal 15 \(SIGTERM\) received by PID|exitcode *: -15\b",
        "killed",
        "Slurm when it ends a job or a step, launchers that were asked to go",
        weak=True,
        sure=0.8,
        hint="somebody asked it to go",
    ),
    cause(
        "killed",
        r"^Killed(?:: 9)?$|:(?: line \d+:)? +\d+ Killed\b|is killed by signal: Killed|^(?:zsh|fish|ksh|csh): killed"
        rf"|terminated by signal SIGKILL|{IS_KILLED}",
        "killed",
        "a shell whose child got SIGKILL; the OOM killer is the usual sender, not the only one",
        sure=0.85,
        hint="so says a shell; the usual sender is the kernel's out-of-memory killer",
    ),
    # Of a peer, in words that no row above knows: every library of collectives has its own.
    general_rows.GENERIC_WAIT,
    general_rows.NO_THREADS,
    # Python, last: any exception at all.
    cause(
        "own_network",
        r"^[\w.]{0,120}?(?:Connect|Timeout|Retry|Protocol|Disconnected|Endpoint|Network|Http|HTTP|URL|gai|SSL|Socket"
        r"|Rpc|Operational|BrokenPipe|Client|Comm)\w{0,60}: "
        r".{0,4000}(?:[Cc]onnect|reset by peer|refused|time|[Pp]ipe|resol)",
        "exception",
        "requests, urllib3, aiohttp, botocore, hub clients, databases: a connection that the script made itself",
        in_traceback=True,
        weak=True,
        hint="a connection of the script's own, and no lost peer",
    ),
    general_rows.GENERIC_PEER,
    cause("assertion", r"^AssertionError\b", "exception", "CPython: a failed assert", in_traceback=True, weak=True),
    cause(
        "exception",
        r"^(?!KeyboardInterrupt|SystemExit)[A-Za-z_][\w.]*(?:: .*)?$",
        "exception",
        "the line that ends a Python traceback: the exception's name and text",
        in_traceback=True,
        weak=True,
    ),
)

BY_NAME = {row.name: row for row in PATTERNS}
