# SPDX-License-Identifier: Apache-2.0
"""What a job has done so far: steps and what they cost, goodput, and the files that keep it."""
