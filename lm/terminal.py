"""What may be shown on a terminal: text of files and models cannot move its cursor, change its colours or its title."""

import logging

# Control signs as pictures of themselves; line ends and tabs stay.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(range(127, 160), "␦")


def harmless(text: str) -> str:
    """The text with pictures in the place of control signs."""
    return text.translate(PICTURES)


class HarmlessFormatter(logging.Formatter):
    """A log line as it is, but for control signs."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
