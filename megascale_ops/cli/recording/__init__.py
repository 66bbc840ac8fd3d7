# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops recording``: what a controller took in, exported, made anonymous and replayed."""
