# SPDX-License-Identifier: Apache-2.0
"""``demo``: train, break and recover on this machine. The verb, what its ranks run, and what it prints."""
