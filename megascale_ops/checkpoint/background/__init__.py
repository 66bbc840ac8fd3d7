# SPDX-License-Identifier: Apache-2.0
"""Saving in two stages: the training process copies its state and goes on, a writer process makes it a checkpoint."""
