# SPDX-License-Identifier: Apache-2.0
"""What the agent can look at: one file for each source, each with ``read()`` (I/O) and ``parse()`` (pure).

``read()`` may fail in any way its source can fail; the daemon counts the failure and goes on with the others.
``parse()`` is given bytes and the time, and is tested with samples of real machines.
"""
