# SPDX-License-Identifier: Apache-2.0
"""What a wrapped launcher can't have of the recovery is said in one line."""

import pytest

from megascale_ops.runner.wrapped.limits import launcher_of, limits


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (("deepspeed", "--num_gpus", "8", "train.py"), "deepspeed"),
        (("python", "-m", "deepspeed.launcher.runner", "train.py"), "deepspeed"),
        (("/opt/venv/bin/accelerate", "launch", "train.py"), "accelerate"),
        (("python3.11", "-m", "accelerate.commands.launch", "train.py"), "accelerate"),
        (("env", "OMP_NUM_THREADS=1", "mpirun", "-np", "8", "python", "train.py"), "mpirun"),
        (("mpiexec.hydra", "-n", "8", "train"), "mpirun"),
        (("numactl", "-N", "0", "torchrun", "train.py"), "torchrun"),
        (("python", "-m", "torch.distributed.run", "train.py"), "torchrun"),
        (("srun", "-n8", "python", "train.py"), "srun"),
        (("ray", "job", "submit", "--", "python", "train.py"), "ray"),
        (("python", "train.py"), ""),
        (("python", "train.py", "--launcher", "deepspeed"), ""),  # an argument of the script's
        (("sh", "-c", "mpirun x"), ""),
        ((), ""),
    ],
)
def test_the_launcher_is_known_by_its_program(command: tuple[str, ...], launcher: str) -> None:
    """Also behind env and numactl, and as a module; not by what is an argument of the script."""
    assert launcher_of(command) == launcher


def test_a_script_that_uses_ray_is_rays() -> None:
    """Ray Train has no program of its own: its script is what a user starts."""
    assert launcher_of(("python", "-u", "t.py"), {"t.py": "import torch\nfrom ray import train\n"}.__getitem__) == "ray"
    assert launcher_of(("python", "-u", "t.py"), {"t.py": "import rays\n"}.__getitem__) == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("deepspeed", "t.py"), ("restarted as a whole", "--elastic_training", "--no_ssh")),
        (("accelerate", "launch", "t.py"), ("restarted as a whole", "--max_restarts", "--machine_rank")),
        (("mpirun", "t"), ("restarted as a whole", "other machines are not watched", "run --hosts")),
        (("ray", "t"), ("restarted as a whole", "FailureConfig")),
        (("./launch.sh",), ("what is wrapped is restarted as a whole",)),
    ],
)
def test_what_it_cannot_have_is_one_line(command: tuple[str, ...], words: tuple[str, ...]) -> None:
    """What is common, and what is this launcher's own."""
    line = limits(command)

    assert "\n" not in line
    assert all(word in line for word in words), line
