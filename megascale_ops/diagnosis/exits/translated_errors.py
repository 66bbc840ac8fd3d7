# SPDX-License-Identifier: Apache-2.0
"""Errors of the system as glibc's catalogue translates them, in the languages that cluster hosts use.

C tools print the translation without the number. The words are whole enough that nothing else has them.
"""

NO_SPACE = (
    "Aucun espace disponible sur", "kein Speicherplatz mehr verf", "No queda espacio en el", "Spazio esaurito sul",
    "Não há espaço disponível", "не осталось свободного места", "空き領域がありません", "设备上没有空间",
    "남은 공간이 없음",
)  # fmt: skip
NO_MEMORY = (
    "Impossible d'allouer de la mémoire", "Nicht genügend Hauptspeicher", "No se pudo asignar memoria",
    "Impossibile allocare memoria", "Não foi possível alocar memória", "メモリを確保できません", "无法分配内存",
)  # fmt: skip
