# SPDX-License-Identifier: Apache-2.0
"""The one recording of this process: opened once, told by hooks and by hand, kept alive by a thread, ended in order."""
