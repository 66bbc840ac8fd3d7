# SPDX-License-Identifier: Apache-2.0
"""The one recording of this process: opened once, fed by hooks and the API, kept alive by a thread, closed at exit."""
