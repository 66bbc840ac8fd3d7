# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of last words that are of no single library.

Jobs of which no process failed: one that stopped by itself, or never began. Peers that have gone, in the words of any
library of collectives. What the kernel and launchers do to a rank's memory and children; ports and addresses.
"""

from megascale_ops.diagnosis.exits.word_rows import Row, cause, victim

# Before what a driver of Ray's says of the actor of a rank; in that driver's own log it is of no rank.
RAY_SAYS = "Ray says of its actor: "
NO_FAILURE_OF_A_PROCESS: tuple[Row, ...] = (
    # A trainer that stops by itself.
    cause(
        "loss_not_finite",
        r"Monitored metric .{1,80} = -?(?:nan|inf)\b.{0,20} is not finite"
        r"|^Batch \d+: Invalid loss, terminating training",
        "loss_nan",
        "Lightning's EarlyStopping with check_finite, Keras' TerminateOnNaN: they end the training in order",
        sure=0.9,
    ),
    # Kubernetes, of a pod that never began.
    cause(
        "never_began",
        r"Failed to pull image|\bfailed to \\?\"?(?:StartContainer|CreatePodSandbox)|\bOCI runtime create failed"
        r"|\b(?:Run|Create)Container(?:Config)?Error\b|\bFailedCreatePodSandBox\b",
        "not_joined",
        "events of a pod, and a kubelet's log, of an image that does not come or a container that cannot be made",
        sure=0.9,
        hint="its container could not be made: its image does not come, or what it asks of its node is not there",
    ),
    # Kubernetes, of a container that it ends itself.
    cause(
        "probe_failed",
        r"\bfailed (?:liveness|startup) probe, will be restarted",
        "killed",
        "a kubelet's event of a container that did not answer its probe, behind which it ends it",
        sure=0.9,
        hint="its kubelet ended it, since its probe had failed",
    ),
    # Ray, of the node below a rank.
    cause(
        "ray_node_dead",
        r"\bmarked dead because the detector has missed too many heartbeats"
        rf"|^{RAY_SAYS}The actor (?:is dead|died) because its node has died",
        "node_lost",
        "Ray's head, which hears no more of a node, and its driver, of an actor there",
        sure=0.9,
        hint="Ray's head hears no more of its node",
    ),
    cause(
        "ray_worker_dead",
        rf"^{RAY_SAYS}(?:The actor (?:is dead|died) because its worker process has died|A worker died or was killed)",
        "killed",
        "Ray's driver, of an actor whose process was gone: by a signal, or as it left without a word",
        sure=0.7,
        hint="so says Ray, which does not know by what",
    ),
)

LOADER_ASKED = "loader_asked"
# What ranks do together.
_TOGETHER = (
    "[Bb]arrier|[Cc]ollective(?: operation)?|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast"
    "|[Rr]endezvous|quorum|pair closure"
)
GENERIC_WAIT = victim(
    "generic_wait",
    rf"\b(?:{_TOGETHER})\b.{{0,80}}\b(?:time[ds]?[ -]?out|timeout|aborted)\b"
    rf"|\b(?:time[ds]?[ -]?out|timeout)\b.{{0,60}}\b(?:{_TOGETHER})\b"
    r"|\b(?:time[ds]?[ -]?out|timeout|gave up)\b.{0,60}\bwait(?:ing)? (?:for|on)\b.{0,30}"
    r"\b(?:ranks?|peers?|(?:other|remaining) (?:processes|workers|nodes))\b"
    r"|^(?:[\w.]{1,80}\.)?RuntimeError: Process group watchdog thread terminated",
    "any library whose barrier or collective gave up: this rank had come to it",
    in_traceback=True,
)
GENERIC_PEER = victim(
    "generic_peer",
    # Of no service, whose connection is the script's own.
    r"^(?!.*(?:\b(?:s3|gs|gcs|az|abfs|hdfs|https?|ftp|oss|hf)://|\b(?:S3|GCS|HTTPS?|Azure|hub)\b)).*?(?:"
    r"\b(?:[Pp]eer(?: rank| process)?|remote (?:rank|process|peer|worker|endpoint|node))\b(?! access).{0,60}"
    r"\b(?:clos(?:ed|ure)|reset|lost|gone|die[ds]|dead|failed|exited|aborted|disconnect(?:ed)?|unreachable"
    r"|time[ds]?[ -]?out|timeout|(?:not|n't) (?:respond|answer|reach)\w*|no (?:response|answer))\b"
    r"|\b(?:closed|reset|aborted|lost|terminated) by (?:the )?(?:remote )?peer\b"
    r"|\bMPI_ERR_(?:PROC_FAILED|REVOKED)\b|\bMPI error: Process failed)",
    "any library over MPI, UCX, NVSHMEM or sockets of its own whose other end has gone",
    in_traceback=True,
)
POISONED_PAGE = cause(
    "poisoned_page",
    r"due to hardware memory corruption",
    "segfault",
    "the kernel's mm/memory-failure.c: SIGBUS to the process that owns a page that can't be read any more",
    hint="memory of its host is broken; see the kernel's log and edac-util",
)
LOADER_STOPPED = cause(
    LOADER_ASKED,
    r"DataLoader worker \(pid[^:]{1,80} is killed by signal: (?:Terminated|Hangup|Interrupt)",
    "killed",
    "torch's DataLoader, one of whose workers got the signal by which launchers stop a rank's processes",
    weak=True,
    sure=0.8,
    hint="somebody asked a worker of its data loader to go",
)
PORT_TAKEN = cause(
    "port_taken",
    r"EADDRINUSE|[Aa]ddress already in use",
    "exception",
    "errno EADDRINUSE, by torch's TCPStore and anybody else: another process has the port",
    hint="another process has the port",
)
NO_ADDRESS = cause(
    "no_address",
    r"\(gai error: -\d|host not found: ",
    "exception",
    "torch's socket.cpp, raised where the address of the store's host cannot be looked up",
    in_traceback=True,
    sure=0.8,
    hint="a name that this rank's host cannot look up",
)
NOT_BUILT_IN = cause(
    "not_built_in",
    r"was requested but PyTorch (?:was|is) buil[dt] without|\b[Dd]istributed package doesn't have \w{1,20} built[ -]in",
    "exception",
    "torch's rendezvous and its init_process_group, of what this build of it lacks: no peer is lost",
    hint="this build of torch lacks what was asked for",
)
NO_THREADS = cause(
    "no_threads",
    r"OpenBLAS blas_thread_init: |\bpthread_create error in blas_\w{1,40}",
    "exception",
    "OpenBLAS, which gets no thread as numpy is imported and sends its own process SIGINT: nobody has pressed a key",
    weak=True,
    hint="no thread or process was to be had: `ulimit -u` of its user, or the pids of its cgroup",
)
