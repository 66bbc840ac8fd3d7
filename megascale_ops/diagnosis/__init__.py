# SPDX-License-Identifier: Apache-2.0
"""Judgement: from what was seen of ranks to the culprits, pure, and without a word of any network or clock."""
