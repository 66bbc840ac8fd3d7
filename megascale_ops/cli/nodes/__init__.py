# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops nodes``: the verb and what it tells."""
