# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops diagnose``: is this node good, and which of several differs from the others."""
