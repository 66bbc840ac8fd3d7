# SPDX-License-Identifier: Apache-2.0
"""What the page shows while a job runs: the feed, its parts, and the stream that carries it."""
