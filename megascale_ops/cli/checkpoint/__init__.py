# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops checkpoint``: what checkpoints there are, whether they are whole, what differs, what may go."""
