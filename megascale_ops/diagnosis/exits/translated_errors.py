# SPDX-License-Identifier: Apache-2.0
"""Errors and signals as the catalogues of glibc and bash translate them, in the languages that cluster hosts use.

C tools print the translation without the number, and shells that of a signal. The words are whole enough that nothing
else has them, or are read only where a shell puts them.
"""

import re

NO_SPACE = (
    "Aucun espace disponible sur", "kein Speicherplatz mehr verf", "No queda espacio en el", "Spazio esaurito sul",
    "Não há espaço disponível", "не осталось свободного места", "空き領域がありません", "设备上没有空间",
    "남은 공간이 없음", "Няма месца на прыладзе", "Няма свободно място на устройството",
    "Na zařízení není volné místo", "Ikke mere plads på enheden",
    "Δεν έμεινε καθόλου χώρος στη συσκευή", "Laitteella ei ole tilaa jäljellä",
    "Nema više prostora na uređaju", "Nincs több hely a lemezen",
    "Įrenginyje neliko vietos", "Ikke mer plass på enheten",
    "Geen ruimte meer over op apparaat", "Brak miejsca na urządzeniu", "Sem espaço livre no dispositivo",
    "Na zariadení už nie je žiadne miesto", "Na napravi ni več prostora", "Није преостало простора на уређају",
    "Enheten är full", "Aygıt üzerinde boş yer yok", "Недостатньо місця на пристрої",
    "Không có đủ chỗ trống trên thiết bị", "裝置上已無多餘空間",
)  # fmt: skip
NO_MEMORY = (
    "Impossible d'allouer de la mémoire", "Nicht genügend Hauptspeicher", "No se pudo asignar memoria",
    "Impossibile allocare memoria", "Não foi possível alocar memória", "メモリを確保できません", "无法分配内存",
    "немагчыма разьмеркаваць памяць", "Не може да се задели памет", "No s’ha pogut reservar memòria",
    "Nelze alokovat paměť", "Kan ikke tildele hukommelse", "Δεν είναι δυνατό να δεσμευτεί μνήμη",
    "Muistin varaaminen ei onnistu", "Ne peut allouer de la mémoire",
    "Nem foglalható memória",
    "메모리를 할당할 수 없습니다", "Nepavyko išskirti atminties",
    "Kan ikke tildele minne", "Onvoldoende geheugen beschikbaar", "Nie można przydzielić pamięci",
    "Impossível alocar memória", "Невозможно выделить память", "Nie je možné prideliť pamäť",
    "Pomnilnika ni mogoče dodeliti", "Не могу да доделим меморију", "Kan inte allokera minne", "Bellek ayrılamadı",
    "Не вдалося розподілити пам’ять", "Không thể cấp phát bộ nhớ", "無法配置記憶體",
)  # fmt: skip
# strsignal(), as shells print it behind the number of a process, and bash's own: read only where they put it.
KILLED = (
    "Getötet", "Processus arrêté", "Ucciso", "Убито", "強制終了", "已杀死", "죽었음", "Забіты",
    "Безусловно прекъснат", "Matat", "Zabit (SIGKILL)", "Dræbt", "Σκοτώθηκε", "Buĉita", "Terminado (killed)",
    "Tapettu", "Matado", "Ubijen", "Kilőve", "Terbunuh", "Nutraukta (killed)", "Drept", "Geëlimineerd",
    "Unicestwiony", "Morto", "Zabitý", "Pobit", "Убијен", "Dödad", "Süreç durduruldu", "Вбито", "Bị buộc kết thúc",
    "強制結束", "Убит", "Mort", "Zabit", "Slået ihjel", "Abgebrochen (Killed)", "Murdu", "Tué", "Maraithe", "Dibunuh",
    "Morto (Killed)", "Omorât", "Uničen", "Öldürüldü", "Вбитий", "Bị giết",
)  # fmt: skip
SEGFAULT = (
    "Speicherzugriffsfehler", "Erreur de segmentation", "Violación de segmento", "Errore di segmentazione",
    "Falha de segmentação", "Ошибка сегментирования", "段错误", "세그멘테이션 오류", "Збой сэгмэнтацыі",
    "Нарушение на разделянето(segfault)", "Violació de segment", "Neoprávněný přístup do paměti (SIGSEGV)",
    "Segmentfejl", "Σφάλμα κατάτμησης (segmentation fault)", "Adres-eraro", "Muistialueen ylitys",
    "Fallo de segmento", "Segmentacijska greška", "Szegmentálási hiba", "Kerusakan segmentasi", "Segmentavimo klaida",
    "Minnesegmentsfeil", "Segmentatiefout", "Naruszenie ochrony pamięci", "Falta de segmentação", "Chyba segmentácie",
    "Napaka segmentacije", "Неуспех сегментације", "Segmenteringsfel", "Parçalama arızası", "Помилка адресування",
    "Lỗi phân đoạn", "程式記憶體區段錯誤", "Грешка в разделянето", "Chyba segmentace", "Segmenteringsfejl",
    "Adressierungsfehler", "Σφάλμα κατάτμησης", "Adreseraro", "Fabht deighilte", "Szegmenshiba",
    "Kesalahan segmentasi", "セグメンテーションフォルト", "세그먼테이션 오류", "Segmentacijos klaida",
    "Segmenteringsfeil", "Eroare de segmentare", "Ошибка сегментации", "Bölünme hatası", "Памылка шыны",
    "Грешка на адресната шина", "Error de bus", "Chyba na sběrnici (neplatná adresa) (SIGBUS)", "Busfejl",
    "Bus-Zugriffsfehler", "Σφάλμα στον δίαυλο(bus)", "Bus-eraro", "Error del bus", "Väylävirhe", "Erreur du bus",
    "Erro no bus de datos", "Sabirnička greška", "Busz hiba", "Errore di bus", "バスエラー", "버스 오류",
    "Magistralės klaida", "Bussfeil", "Busfout", "Błąd szyny", "Erro de bus", "Erro no barramento", "Ошибка шины",
    "Chyba na zbernici", "Napaka vodila", "Грешка сабирнице", "Bussfel", "Veri yolu hatası",
    "Помилка каналу обміну даними", "Lỗi bus", "总线错误", "匯流排錯誤", "Грешка в шината", "Chyba sběrnice",
    "Bus-fejl", "Bus-Fehler", "Erreur de bus", "Earráid bhus", "Erro no bus", "Greška sabirnice", "Buszhiba",
    "Erro do barramento", "Eroare de magistrală de date(bus)", "chyba zbernice", "Veriyolu hatası", "Помилка шини",
)  # fmt: skip
ABORTED = (
    "Прекъснат", "Avortat", "Neúspěšně ukončen (SIGABRT)", "Afbrudt (SIGABRT)", "Abgebrochen", "Ακυρώθηκε",
    "Abortita", "Abortado", "Keskeytetty", "Abandon", "Prekid", "Félbeszakítva", "Dibatalkan", "Annullato", "中止",
    "중지됨", "Avbrutt (SIGABRT)", "Afgebroken", "Przerwane", "Аварийный останов", "Zrušené",
    "Prekinjen", "Прекинуто", "Avbruten (SIGABRT)", "İptal edildi", "Перервано", "Bị hủy bỏ", "已放弃",
)  # fmt: skip
_OF_SIGNALS = frozenset((*KILLED, *SEGFAULT, *ABORTED))
# "start.sh: linia 9: 118822 Naruszenie ochrony pamięci": each language has its own word for a line, and its own place.
_OF_A_SHELL = re.compile(r"[^:\n]{1,200}: [^:\d\n]{0,20}\d{1,6}[^:\d\n]{0,6}: +\d{1,8} +\S")


def _any_of(words: tuple[str, ...]) -> str:
    return "|".join(map(re.escape, words))


# Patterns of a shell's line: behind the number of a process, or by itself.
IS_KILLED = rf"(?:^|: +\d+ )(?:{_any_of(KILLED)})(?:$|  )"
IS_SEGFAULT = rf"(?:^|: +\d+ )(?:{_any_of(SEGFAULT)})(?:$|  | \()"
# Short words of everyday speech: by itself only where a shell says behind it, in words, that memory was dumped.
IS_ABORTED = (
    rf"(?:^(?=[^(\n]{{1,60}} \([^()\d\n]{{4,60}}\)$)|: +\d+ )(?:{_any_of(ABORTED)})(?:$|  | \((?!Killed|Terminated))"
)


def is_of_a_shell(line: str) -> bool:
    """Return whether a line may be a shell's, of the signal that ended its child, in whatever language."""
    if line in _OF_SIGNALS or (": " in line and _OF_A_SHELL.match(line) is not None):
        return True
    return line.partition(" (")[0].rstrip() in _OF_SIGNALS or line.partition("  ")[0] in _OF_SIGNALS
