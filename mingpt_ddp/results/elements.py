"""Elements of a page, as HTML; all texts are escaped."""

from collections.abc import Sequence
from html import escape

Cells = dict[str, str]  # a row of a table by title, the same titles in each row


def bullets(texts: list[str]) -> str:
    """Return a bulleted list; "" without texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def grid(figures: str) -> str:
    """Return the elements of several figures, in rows; "" without figures."""
    return figures and f'<div class="plots">{figures}</div>'


def used_columns(rows: list[Cells]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of a table, without the columns that no row has."""
    titles = []
    for title in rows[0] if rows else ():
        if any(row[title] not in ("", "-") for row in rows):
            titles.append(title)
    return titles, [[row[title] for title in titles] for row in rows]


def table(rows: list[Cells], links: Sequence[str] = ()) -> str:
    """Return a table that can be sorted by each column, and scrolls; "" without rows.

    Args:
        links: URLs for the last cell of each row; "" for none.
    """
    titles, cells = used_columns(rows)
    head = "".join(f"<th><button>{escape(title)}</button></th>" for title in titles)
    body = ""
    for index, row in enumerate(cells):
        texts = [escape(cell) for cell in row]
        if links and links[index]:
            texts[-1] = f'<a href="{escape(links[index])}">{texts[-1]}</a>'
        body += f"<tr><td>{'<td>'.join(texts)}"
    html = f"<table><thead><tr>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{html}</div>' if rows else ""
