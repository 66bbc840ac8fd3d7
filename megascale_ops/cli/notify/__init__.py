# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops notify``: how people are told of incidents, tried without one."""
