# SPDX-License-Identifier: Apache-2.0
"""``top``: one job on one screen. The verb, the program that runs, and pure functions that draw."""
