# SPDX-License-Identifier: Apache-2.0
"""One job: its record, its state machine, and the transitions that change it."""
