# SPDX-License-Identifier: Apache-2.0
"""The node daemon: one for each node, looks at every rank ten times a second, tells the controller, obeys it.

It never imports torch, so that it is up in half a second and lives in 60 MB beside the training it watches.
"""
