# SPDX-License-Identifier: Apache-2.0
"""What the journal keeps of a job, and the states that it can be in."""
