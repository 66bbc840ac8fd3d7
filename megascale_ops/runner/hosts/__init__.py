# SPDX-License-Identifier: Apache-2.0
"""``run --hosts FILE``: the same launch on several machines, by ssh alone."""
