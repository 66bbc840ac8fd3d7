# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops doctor``: what of this machine's set-up is missing, and what that costs."""
