# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of last words for jobs of which no process failed: one that stopped by itself, or never began."""

from megascale_ops.diagnosis.exits.word_rows import Row, cause

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
        "no_image",
        r"Failed to pull image",
        "not_joined",
        "an event of a pod whose image does not come: its rank never began",
        sure=0.9,
        hint="the image of its container does not come",
    ),
    # Ray, of the node below a rank.
    cause(
        "ray_node_dead",
        r"\bmarked dead because the detector has missed too many heartbeats",
        "node_lost",
        "Ray's head, which hears no more of a node",
        sure=0.9,
        hint="Ray's head hears no more of its node",
    ),
)
