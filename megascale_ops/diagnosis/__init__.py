# SPDX-License-Identifier: Apache-2.0
"""Judgement: from what was seen of ranks to who is to blame, pure, and without a word of any network or clock."""
