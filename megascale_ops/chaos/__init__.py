# SPDX-License-Identifier: Apache-2.0
"""Break a training job on purpose, one fault at a time, and score what was made of it against the truth."""
