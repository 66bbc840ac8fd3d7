# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops plan``."""
