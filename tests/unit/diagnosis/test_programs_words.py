# SPDX-License-Identifier: Apache-2.0
"""One end of a rank in the words of many programs: launchers, shells, signal handlers, engines, storage, libraries."""

import pytest

from megascale_ops.diagnosis.exits.last_words import match


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("slurmstepd: error: Some of your processes may have been killed by the cgroup out-of-memory handler.",
         "out_of_memory"),
        ("The node was low on resource: memory. Threshold quantity: 100Mi, available: 42Mi.", "out_of_memory"),
        ("memory allocation of 8589934592 bytes failed", "out_of_memory"),
        ("The node was low on resource: ephemeral-storage.", "disk_full"),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 10Gi.", "disk_full"),
        ("LustreError: 11-0: fs-OST0001-osc: operation ost_write failed with -28", "disk_full"),
        ("Failed to initialize NVML: Unknown Error", "cuda_error"),
        ("Unable to determine the device handle for GPU0000:65:00.0: Unknown Error", "cuda_error"),
        ("command terminated with exit code 137", "killed"),
        ("Command terminated by signal 9", "killed"),
        ("Process finished with exit code 139 (interrupted by signal 11: SIGSEGV)", "segfault"),
        ("subprocess exited with status 135", "segfault"),
        ("container exited with code 134", "aborted"),
        ("*** SIGSEGV received at time=1712345678 on cpu 3 ***", "segfault"),
        ("*** SIGBUS (@0x0) received by PID 1234 (TID 0x7f2) from PID 0; stack trace: ***", "segfault"),
        ("*** SIGABRT received at time=1712345678 on cpu 3 ***", "aborted"),
        ("Illegal instruction (core dumped)", "segfault"),
        ("Floating point exception (core dumped)", "segfault"),
        ("free(): corrupted unsorted chunks", "aborted"),
        ("malloc_consolidate(): unaligned fastbin chunk detected", "aborted"),
        ("*** buffer overflow detected ***: terminated", "aborted"),
        ("pure virtual method called", "aborted"),
        ("prterun noticed that process rank 3 with PID 311 on node n3 exited on signal 9 (Killed).", "killed"),
        ("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)", "killed"),
        ("srun: error: n3: task 12: Killed", "killed"),
        ("python3[4242]: segfault at 8 ip 00007f0 sp 00007ff error 4 in libc.so.6[7f00+1000]", "segfault"),
        ("traps: python3[123] general protection fault ip:7f sp:7f error:0 in libtorch_cpu.so", "segfault"),
        ("oom_reaper: reaped process 4242 (python3), now anon-rss:0kB, file-rss:0kB", "out_of_memory"),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded", "cuda_error"),
        ("n3:7:31 [2] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_create_qp failed with error Invalid argument",
         "nccl_error"),
        ("n3:7:31 [2] misc/ibvwrap.cc:131 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
         "peer_lost"),
        ("n3:7:31 [2] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found", "nccl_error"),
        ("CUDA Error: out of memory", "out_of_memory"),
        ("slurmstepd: error: StepId=77.0 exceeded memory limit (70000000 > 65536000), being killed", "out_of_memory"),
        ("slurmstepd-n3: error: *** STEP 77.0 ON n3 CANCELLED AT 2026-11-26T00:00:00 ***", "killed"),
        ("/var/spool/slurmd/job77/slurm_script: line 30: 4242 Aborted                 (core dumped) python", "aborted"),
        ("./launch.sh: line 7:  4242 Getötet                 python train.py", "killed"),
        ("已杀死", "killed"),
        ("./launch.sh: linia 7: 4242 Unicestwiony            python train.py", "killed"),
        ("./launch.sh: 7 行:  4242 セグメンテーションフォルト   (コアダンプ) python train.py", "segfault"),
        ("./launch.sh: regel 7:  4242 Afgebroken              (geheugendump gemaakt) python train.py", "aborted"),
        ("./launch.sh : ligne 7 :  4242 Abandon                 (core dumped) python train.py", "aborted"),
        ("./launch.sh: Zeile 7:  4242 Abgebrochen (Killed)    python train.py", "killed"),
        ("cp: błąd zapisu '/d/x': Brak miejsca na urządzeniu", "disk_full"),
        ("zsh: killed     python train.py", "killed"),
        ("fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)", "killed"),
        ("Speicherzugriffsfehler (Speicherabzug geschrieben)", "segfault"),
        ("Erreur de segmentation (core dumped)", "segfault"),
        ("Abgebrochen (Speicherabzug geschrieben)", "aborted"),
        ("start.sh: linia 9: 118822 Przerwane               (zrzut pamięci) python t.py", "aborted"),
        ("Abgebrochen (Killed)", "killed"),
        ("libc++abi: terminating due to uncaught exception of type std::runtime_error: x", "aborted"),
        ("[n1:1:0:1] UCX  ERROR  connect to n2 failed: Endpoint timeout", "peer_lost"),
        ("CUDA Error 700 at solver.cc:12", "cuda_error"),
        ("CUDA error(719), unspecified launch failure.", "cuda_error"),
        ("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCStorage.cu:58", "out_of_memory"),
        ("Cuda error /w/reduce.cuh:307 'peer access is not supported between these two devices'", "cuda_error"),
        ("Error named symbol not found at line 116 in file /w/ops.cu", "cuda_error"),
        ("n3: Test CUDA failure common.cu:730 'unknown error'", "cuda_error"),
        ("NPU function error: c10_npu::acl::AclrtSynchronizeStream, error code is 507035", "cuda_error"),
        ("fault kernel_name=MatMul, there is an aicore exception, core id is 3", "cuda_error"),
        ("2026-Nov-01 ERROR NRT:nrt_execute failed with status 1006", "cuda_error"),
        ("terminate: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "cuda_error"),
        ("W tsl/framework/bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to allocate 24.50GiB",
         "out_of_memory"),
        ("Aug 18 03:19:11 n1 kernel: Killed process 7748 (python) total-vm:12907828kB", "out_of_memory"),
        ("Out of memory: Kill process 7748 (python) score 900 or sacrifice child", "out_of_memory"),
        ("distributed.nanny - WARNING - Worker exceeded 95% memory budget.", "out_of_memory"),
        ("ERROR 03-31 15:47:20 Worker process pid 1867861 died, exit code: -9", "killed"),
        ("ERROR 03-31 15:47:20 Worker process pid 1867861 died, exit code: -11", "segfault"),
        ("EI0002: The wait execution of the Notify register times out.", "peer_lost"),
        ("NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115",
         "peer_lost"),
    ],
)  # fmt: skip
def test_programs_tell_of_the_same_end_in_their_own_words(line: str, fault: str) -> None:
    """Launchers, handlers of signals, engines and storage each have words of their own for one end."""
    row = match(line)

    assert row is not None
    assert row.fault == fault


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("RuntimeError: No CUDA GPUs are available", "cuda_error"),
        ("pynvml.NVMLError_Unknown: Unknown Error", "cuda_error"),
        ("RuntimeError: Triton Error [CUDA]: misaligned address", "cuda_error"),
        ("RuntimeError: Triton Error [CUDA]: out of memory", "out_of_memory"),
        ("RuntimeError: Failed to allocate pinned memory: cudaHostAlloc returned 2", "out_of_memory"),
        ("RuntimeError: NVSHMEM init failed: out of host memory", "out_of_memory"),
        ("sqlite3.OperationalError: database or disk is full", "disk_full"),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGABRT", "aborted"),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "cuda_error"),
        ("torch.cuda.CudaError: initialization error (3)", "cuda_error"),
        ("RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR", "cuda_error"),
        ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: TPU backend error", "out_of_memory"),
        ("grpc._channel._Rendezvous: RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)", "exception"),
        ("jax.errors.JaxRuntimeError: ABORTED: Coordination service agent is in ERROR: task 3 crashed", "peer_lost"),
        ("joblib.externals.loky.process_executor.TerminatedWorkerError: exit codes of the workers are {SIGKILL(-9)}",
         "killed"),
        ("numba.cuda.cudadrv.driver.CudaAPIError: [700] Call to cuMemcpyDtoHAsync results in UNKNOWN_CUDA_ERROR",
         "cuda_error"),
        ("RuntimeError: RCCL error: unhandled cuda error", "nccl_error"),
        ("RuntimeError: oneCCL: ze error at zeMemOpenIpcHandle, code: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
         "out_of_memory"),
        ("RuntimeError: Timeout waiting for key: default_pg/0//cuda// after 300000 ms", "peer_lost"),
        ("RuntimeError: Work ran time out after 1800000 milliseconds.", "peer_lost"),
        ("pynvml.NVMLError_NotSupported: Not Supported", "exception"),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 1", "exception"),
        ("ValueError: exit code 1370 of the tokenizer", "exception"),
        ("RuntimeError: cuDNN Frontend error: No valid engine configs for Matmul_", "cuda_error"),
        ('RuntimeError: nrt_load_collectives status=4 message="Allocation Failure"', "out_of_memory"),
        ("RuntimeError: [Rank:2] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB",
         "out_of_memory"),
        ("tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted by: Socket closed",
         "peer_lost"),
        ("RuntimeError: mesh_service.cc:364 : Failed to meet rendezvous 'save': Socket closed (14)", "peer_lost"),
        ("grpc._channel._InactiveRpcError: UNAVAILABLE: failed to connect to all addresses of the feature store",
         "exception"),
        ("ValueError: Allocation failed for user 7: no slots", "exception"),
        ("KeyError: 'cuda error'", "exception"),
    ],
)  # fmt: skip
def test_exceptions_tell_of_the_same_end_in_their_own_words(line: str, fault: str) -> None:
    """What stands behind the exception counts, and not the exception's name."""
    row = match(line, ends_traceback=True)

    assert row is not None
    assert row.fault == fault


@pytest.mark.parametrize(
    "line", ["Abandon", "Abandon (retry 3)", "Annullato (epoca 3)", "中止", "Abgebrochen (3 von 4) von Hand"]
)
def test_a_shells_short_word_alone_is_everyday_speech(line: str) -> None:
    """Only what it says behind it, that memory was dumped, or the number of a process before it, makes it a shell's."""
    assert match(line) is None
