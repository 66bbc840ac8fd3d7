# SPDX-License-Identifier: Apache-2.0
"""Ranks that another launcher has started: a process's rank is known only once the process declares it."""
