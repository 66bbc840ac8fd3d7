# SPDX-License-Identifier: Apache-2.0
"""What comes in, kept for a while, so that what happened can be replayed."""
