# SPDX-License-Identifier: Apache-2.0
"""Errors and signals as glibc's catalogue translates them, in the languages that cluster hosts use.

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
# strsignal(), as shells print it behind the number of a process: read only where it stands as they put it.
KILLED = ("Getötet", "Processus arrêté", "Ucciso", "Убито", "強制終了", "已杀死", "죽었음")
SEGFAULT = (
    "Speicherzugriffsfehler", "Erreur de segmentation", "Violación de segmento", "Errore di segmentazione",
    "Falha de segmentação", "Ошибка сегментирования", "段错误", "세그멘테이션 오류",
)  # fmt: skip
