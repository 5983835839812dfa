"""Elements of a page, as HTML; all texts are escaped."""

from collections.abc import Sequence
from html import escape

Row = list[tuple[str, str]]  # titles and cells, the same titles in each row of a table


def bullets(texts: list[str]) -> str:
    """Return a bulleted list; "" without texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def grid(figures: str) -> str:
    """Return the elements of several figures, in rows; "" without figures."""
    return figures and f'<div class="plots">{figures}</div>'


def used_columns(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of a table, without the columns that no row has."""
    columns = []
    for column in zip(*rows, strict=True):
        if any(cell not in ("", "-") for _, cell in column):
            columns.append(column)
    titles = [column[0][0] for column in columns]
    return titles, [[column[index][1] for column in columns] for index in range(len(rows))]


def table(rows: list[Row], links: Sequence[str] = ()) -> str:
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
