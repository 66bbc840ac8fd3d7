# SPDX-License-Identifier: Apache-2.0
"""The node agent: one on each node; samples every rank at 10 Hz, reports to the controller, executes its orders.

It never imports torch, so that it is up in half a second and lives in 60 MB beside the training it watches.
"""
