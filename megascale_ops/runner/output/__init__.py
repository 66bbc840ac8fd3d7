# SPDX-License-Identifier: Apache-2.0
"""What the ranks and the runner print, on the terminal: one thread, one mechanism, nothing dropped in silence."""
