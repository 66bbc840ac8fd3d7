# SPDX-License-Identifier: Apache-2.0
"""Settings: four sources into one struct, and ``config show``, which shows where each value came from."""
