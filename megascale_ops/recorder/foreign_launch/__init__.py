# SPDX-License-Identifier: Apache-2.0
"""Ranks that another launcher has started: which process is which rank is known only when the process says so."""
