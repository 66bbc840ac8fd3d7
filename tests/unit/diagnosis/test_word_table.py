# SPDX-License-Identifier: Apache-2.0
"""Each row of the table of last words has a real line that it names, and a near miss that it leaves alone."""

import subprocess
import sys

import pytest

from megascale_ops.diagnosis.exits.last_words import match, row_of_error, strip_prefix
from megascale_ops.diagnosis.exits.quick_look import HINT
from megascale_ops.diagnosis.exits.word_rows import CAUSE
from megascale_ops.diagnosis.exits.word_table import PATTERNS
from megascale_ops.schema.fault_classes import FAULTS
from tests.unit.diagnosis.word_samples import GENERAL, Sample

# fmt: off
SAMPLES = (
    *GENERAL,
    Sample(
        "tile_timeout",
        "megascale_kernels.errors.TileTimeout: rank 0, ag_gemm launch 3, CTA 5, tile 17: waited 20.0 s for rank 1",
        "ValueError: no TileTimeout: is set",
        ends_traceback=True,
    ),
    Sample(
        "kernel_mismatch",
        "megascale_kernels.errors.RankMismatch: rank 0 runs ag_gemm; rank 1 runs gemm_rs: all ranks must run the same",
        "ValueError: RankMismatch between files",
        ends_traceback=True,
    ),
    Sample(
        "gloo_peer_closed",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234",
        "requests.exceptions.ConnectionError: Connection closed by peer",
        ends_traceback=True,
    ),
    Sample(
        "gloo_mismatch",
        "  what():  [enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. "
        "72 vs 36. Received data size doesn't match expected size. Is there a distributed collective mismatch?",
        "gloo: the received data size matches",
    ),
    Sample(
        "nccl_mismatch",
        "n0:9:9 [0] transport/net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer 10.1.2.3<5> collective mismatch "
        "error, local size 496640 remote size 65536",
        "INFO checked: no collective mismatch error in 40 steps, local size 8",
    ),
    Sample(
        "locked_memory",
        "n1:9:9 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        "INFO NET/IB: memory is registered, all can be allocated",
    ),
    Sample(
        "mpi_daemon_lost",
        "PRTE has lost communication with a remote daemon.",
        "INFO lost communication with the tracker, going on without",
    ),
    Sample(
        "rpc_peer",
        "RuntimeError: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
        "ValueError: tensorpipe/ is no folder of data",
        ends_traceback=True,
    ),
    Sample(
        "horovod_peer",
        "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce",
        "INFO Horovod has been shut down.",
    ),
    Sample(
        "gpu_wait",
        "[FATAL] CUDASymmetricMemory::barrier: rank 2 failed to receive signal from rank 5 in channel 0 after 6000 us",
        "INFO DeepEP: buffers are made, timeout 100 s",
    ),
    Sample(
        "jax_peer",
        "F1124 10:11:12.131131 812 client.h:80] Terminating process because the JAX distributed service detected fatal "
        "errors. This most likely indicates that another task died",
        "INFO the coordination service is up, 4 tasks are connected",
    ),
    Sample(
        "gloo_timeout",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] "
        "Timed out waiting 1800000ms for recv operation to complete",
        "INFO data loader: Timed out waiting 30 s for the cache, reading from disk",
        ends_traceback=True,
    ),
    Sample(
        "gloo_connect",
        "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
        "gloo backend initialised, 4 ranks in the mesh",
        ends_traceback=True,
    ),
    Sample(
        "ucx_peer",
        "[n1:3412:0:3412] ib_mlx5_log.c:177  Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15 vend 0x81)",
        "UCX  INFO  ib_mlx5_log.c:90 transport retry count is 7 on mlx5_0:1",
    ),
    Sample(
        "nccl_remote",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "NCCL INFO Connected all rings to remote processes",
    ),
    Sample(
        "nccl_timeout",
        "[rank2]:[E1103 10:20:30.123 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=17, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600064 milliseconds",
        "Watchdog thread started, collective timeout is 600 s",
    ),
    Sample(
        "nccl_watchdog",
        "[PG ID 1 PG GUID 3 Rank 0] Exception (either an error or timeout) detected by watchdog at work: 21937, last "
        "enqueued NCCL work: 21937, last completed NCCL work: 21936.",
        "watchdog at work: 8 collectives, none is late",
    ),
    Sample(
        "tf_collective",
        "E tensorflow/core/common_runtime/base_collective_executor.cc:249] BaseCollectiveExecutor::StartAbort "
        "DEADLINE_EXCEEDED: Deadline Exceeded",
        "BaseCollectiveExecutor::StartAbort OUT_OF_RANGE: End of sequence",
    ),
    Sample(
        "nccl_aborted",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        "NCCL communicator was created on rank 1",
        ends_traceback=True,
    ),
    Sample(
        "rendezvous_closed",
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "INFO the rendezvous was closed in order, no RendezvousClosedError",
        ends_traceback=True,
    ),
    Sample(
        "store_lost",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
        "INFO TCPStore listens on port 29500",
        ends_traceback=True,
    ),
    Sample(
        "monitored_barrier",
        "[rank0]: RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 6000 ms",
        "INFO monitoredBarrier passed in 6 ms",
        ends_traceback=True,
    ),
    Sample(
        "cuda_out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB",
        "INFO memory: 20.00 GiB of 79.15 GiB in use on CUDA device 0",
        ends_traceback=True,
    ),
    Sample(
        "host_out_of_memory",
        "MemoryError",
        "catches MemoryError and goes on",
        ends_traceback=True,
    ),
    Sample(
        "oom_killer",
        "[12345.678] Out of memory: Killed process 4242 (python3) total-vm:123kB, anon-rss:99kB, UID:0 pgtables:2kB",
        "set oom_score_adj to 100",
    ),
    Sample(
        "shm_full",
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
        ends_traceback=True,
    ),
    Sample(
        "xid",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python3, GPU has fallen off the bus.",
        "loaded NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15",
    ),
    Sample(
        "cuda_error",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "CUDA available: True, errors so far: 0",
        ends_traceback=True,
    ),
    Sample(
        "nccl_error",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error",
        "NCCL version 2.27.7+cuda12.9, no errors",
        ends_traceback=True,
    ),
    Sample(
        "disk_full",
        "OSError: [Errno 28] No space left on device: '/checkpoints/.step-00000200.partial/__0_0.distcp'",
        "space left on /checkpoints: 12 GB",
        ends_traceback=True,
    ),
    Sample(
        "segfault",
        "Fatal Python error: Segmentation fault",
        "segmentation model loaded, no faults in the data",
    ),
    Sample(
        "aborted",
        "terminate called after throwing an instance of 'std::runtime_error'",
        "epoch aborted early by the scheduler",
    ),
    Sample(
        "killed",
        "./launch.sh: line 7:  4242 Killed                  python train.py",
        "Killed the background loader as asked",
    ),
    Sample(
        "assertion",
        "AssertionError: loss is not finite",
        "AssertionErrors are reported to the log",
        ends_traceback=True,
    ),
    Sample(
        "exception",
        "mypkg.data.Broken: shard 17",
        "KeyboardInterrupt",
        ends_traceback=True,
    ),
    Sample(
        "tuner_limit",
        "OutOfMemoryError: out of resource: triton_mm Required: 262144 Hardware limit:232448",
        "RuntimeError: CUDA error: too many resources requested for launch",
        ends_traceback=True,
    ),
    Sample(
        "chatter",
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n0]:29500 (errno: 99).",
        "torch.distributed.DistNetworkError: The client socket has failed to connect to n0:29500",
    ),
    Sample(
        "checked_mismatch",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: X",
        "INFO no mismatch between the collectives of all ranks",
        ends_traceback=True,
    ),
    Sample(
        "raised_out_of_memory",
        "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.",
        "ValueError: 2 GB of memory are kept free",
        ends_traceback=True,
    ),
    Sample(
        "loader_killed",
        "RuntimeError: DataLoader worker (pid 9382) is killed by signal: Killed. ",
        "RuntimeError: DataLoader worker (pid 9382) is killed by signal: Segmentation fault. ",
        ends_traceback=True,
    ),
    Sample(
        "loader_died",
        "RuntimeError: DataLoader worker (pid(s) 9382, 9383) exited unexpectedly",
        "RuntimeError: DataLoader worker (pid(s) 9382) exited unexpectedly with exit code 1.",
        ends_traceback=True,
    ),
    Sample(
        "torch_writer",
        "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 1216 vs 1110",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        ends_traceback=True,
    ),
    Sample(
        "ib_completion",
        "NET/IB: Got completion from peer 10.0.1.9<41293> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB",
    ),
    Sample(
        "nccl_dump",
        "[PG ID 0 PG GUID 0(default_pg) Rank 6] Received a dump signal due to a collective timeout from  rank 7 and",
        "NCCL dumps its signal handlers' state",
    ),
    Sample(
        "port_taken",
        "OSError: [Errno 98] Address already in use",
        "INFO port 29500 is used already, taking 29501",
        ends_traceback=True,
    ),
    Sample(
        "torch_peer",
        "RuntimeError: Connection reset by peer",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        ends_traceback=True,
    ),
    Sample(
        "nccl_stuck",
        "[Rank 2] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress",
        "watchdog: 600 seconds without a checkpoint, making one",
    ),
    Sample(
        "nccl_teardown",
        "[Rank 1] To avoid data inconsistency, we are taking the entire process down.",
        "to avoid inconsistency the process is taken out of the pool",
    ),
    Sample(
        "cuda_node",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        ends_traceback=True,
    ),
    Sample(
        "nccl_usage",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        "NCCL INFO found no duplicate of GPU 1b000",
    ),
    Sample(
        "child_segfault",
        "  traceback : Signal 11 (SIGSEGV) received by PID 77",
        "Signal 15 (SIGTERM) received by PID 77",
    ),
    Sample("child_killed", "  exitcode  : -9 (pid: 77)", "exitcode  : 0 (pid: 77)"),
    Sample("child_aborted", "  traceback : Signal 6 (SIGABRT) received by PID 77", "Signal 9 (SIGKILL) received"),
    Sample("heap", "free(): invalid pointer", "Aborted (core dumped)"),
    Sample(
        "cancelled",
        "slurmstepd: error: *** STEP 99.0 ON n1 CANCELLED AT 2026-02-01T10:00:00 DUE TO TIME LIMIT ***",
        "INFO cancelled the upload",
    ),
    Sample(
        "other_peer",
        "EI0006: [PID: 977] 2026-11-08-18:07:20 Getting socket times out. Reason: Remote Rank did not send the data",
        "INFO HCCL_CONNECT_TIMEOUT is 120 s, HCCL_EXEC_TIMEOUT is 1836 s",
    ),
    Sample(
        "xla_service",
        "jaxlib.xla_extension.XlaRuntimeError: UNAVAILABLE: failed to connect to all addresses; Socket closed",
        "grpc._channel._InactiveRpcError: StatusCode.UNAVAILABLE of the feature store",
        ends_traceback=True,
    ),
    Sample(
        "own_network",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset'))",
        "ValueError: the connection string is empty",
        ends_traceback=True,
    ),
)
# fmt: on


def test_every_pattern_has_a_sample() -> None:
    """A pattern without a match in a real log is a guess."""
    assert {sample.name for sample in SAMPLES} == {pattern.name for pattern in PATTERNS}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_real_line_is_named(sample: Sample) -> None:
    """The line is named by its own pattern, not by an earlier and more general one."""
    line = strip_prefix(sample.line)

    found = match(line, ends_traceback=sample.ends_traceback)

    assert found is not None
    assert found.name == sample.name


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_near_miss_is_left_alone(sample: Sample) -> None:
    """A line that only looks alike is not taken for last words of that kind."""
    found = match(sample.near_miss, ends_traceback=sample.ends_traceback)

    assert found is None or found.name != sample.name


@pytest.mark.parametrize("sample", [s for s in SAMPLES if not s.ends_traceback], ids=lambda sample: sample.name)
def test_the_cheap_look_lets_no_known_line_pass(sample: Sample) -> None:
    """Lines outside of tracebacks are judged only when the hint matches, so it must match all of them."""
    assert HINT.search(sample.line)


@pytest.mark.parametrize(
    "line",
    [
        "terminate called without an active exception",
        "Aborted (core dumped)",
        "free(): invalid pointer",
        "double free or corruption (!prev)",
        "python: pair.cc:12: int main(): Assertion `x > 0' failed.",
        "Segmentation fault (core dumped)",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "Memory cgroup out of memory: Killed process 99 (python)",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "Killed",
    ],
)
def test_other_known_lines_are_named_too(line: str) -> None:
    """Each alternative of a pattern outside of tracebacks passes the hint."""
    assert match(line) is not None


@pytest.mark.parametrize(
    "line",
    [
        "worker 3 exited with code 0",
        "CUDA errors: 0, NCCL errors: 0",
        "cuda error code 0",
        "CUDA error: no error",
        "checking of CUDA errors is on",
        "the NPU error log is at /var/log/npu",
        "NRT_LOG_LEVEL is set, nrt_init took 3.1 s",
        "ZE_AFFINITY_MASK=0 ZE_ENABLE_PCI_ID_DEVICE_ORDER=1",
        "Process 4711 was killed by hand, Killed process table is empty",
        "allocation of 4 nodes succeeded",
        "all 8 tasks exited with exit code 0, 137 files written",
        "step 137, exit code is checked at 139",
        "signal handlers for SIGTERM and SIGUSR1 are set",
        "*** 3 devices detected ***",
        "NVML initialised, 8 devices",
        "Ein Prozess wurde von Hand Getötet und neu gestartet",
        "process 7 Terminated the upload as asked",
        "step 100 loss 2.34 lr 3e-4",
        "100%|##########| 500/500 [00:10<00:00, 49.9it/s]",
        "UserWarning: lr_scheduler.step() before optimizer.step()",
        "W1103 10:20:30 Server listening to UNIX /dev/shm/x.sock",
        "validation error 0.12, training error 0.10",
        "",
    ],
)
def test_an_ordinary_log_names_no_fault(line: str) -> None:
    """A training run that goes well has no last words."""
    assert match(line) is None


def test_a_consequence_is_no_cause() -> None:
    """Only lines that blame another rank are consequences; every other row carries a class that a verdict may have."""
    for row in PATTERNS:
        assert row.consequence == (row.fault not in FAULTS)
        assert row.why
        assert row.role == CAUSE or not row.weak


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.ends_traceback], ids=lambda sample: sample.name)
def test_what_is_raised_and_what_is_printed_mean_the_same(sample: Sample) -> None:
    """One table judges the line in a log and the exception that a black box holds."""
    type_, _, message = strip_prefix(sample.line).partition(": ")

    assert row_of_error(type_, message).name == sample.name


def test_the_rank_prefix_does_not_hide_a_line() -> None:
    """Torch writes ``[rank3]: `` before each line when several ranks share a terminal."""
    assert strip_prefix("[rank3]: ValueError: x") == "ValueError: x"
    assert strip_prefix("[rank3]:   File") == "  File"
    assert strip_prefix("[info] x") == "[info] x"
    assert strip_prefix("[1,3]<stderr>: ValueError: x") == "ValueError: x"
    assert strip_prefix("(train pid=77, ip=10.0.0.1) ValueError: x") == "ValueError: x"
    assert strip_prefix("12: ValueError: x") == "ValueError: x"


def test_a_program_that_starts_compiles_no_row_and_one_that_meets_an_error_does() -> None:
    """All rows are 13 ms of CPU for each runner, controller and agent; an ordinary line asks for none of them."""
    probe = (
        "import re\n"
        "compiled, compile_it = set(), re.compile\n"
        "re.compile = lambda words, *flags: compiled.add(words) or compile_it(words, *flags)\n"
        "from megascale_ops.diagnosis.exits import last_words\n"
        "rows = {row.regex for row in last_words.PATTERNS}\n"
        "print(last_words.match('step 60 loss 2.31'), len(rows & compiled))\n"
        "print(last_words.match('torch.OutOfMemoryError: CUDA out of memory').fault, rows <= compiled)\n"
    )

    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "None 0\nout_of_memory True\n"
