"""The style sheet of the API reference."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #23212b; --soft: #5f5b6b; --paper: #fffdfd; --card: #fbf6f8; --line: #e6dce1; --accent: #ad1f5b;
  --code: #f6eef2; --get: #1f6f8b; --post: #2f7d4f; --put: #96610c; --delete: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #eae6ee; --soft: #aaa3b3; --paper: #17151b; --card: #1f1c25; --line: #37323f; --accent: #ff9cc2;
    --code: #25212c; --get: #7cc7e0; --post: #86d3a2; --put: #e6b566; --delete: #ff9a90;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; -webkit-text-size-adjust: 100%; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body {
  margin: 0; color: var(--ink); background: var(--paper);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
a { color: var(--accent); text-decoration-thickness: 1px; text-underline-offset: 0.15em; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 3px; }
.skip { position: absolute; left: -100vw; }
.skip:focus { left: 1rem; top: 1rem; background: var(--paper); padding: 0.5rem; }
header { padding: 3rem 2rem 2rem; border-bottom: 1px solid var(--line); background: var(--card); }
header > * { max-width: 76rem; margin-inline: auto; }
header p { max-width: 76rem; }
h1 { font-size: 2.2rem; line-height: 1.15; margin: 0 auto 0.5rem; letter-spacing: -0.02em; }
h1 span { color: var(--soft); font-weight: 400; }
.columns { display: grid; grid-template-columns: 17.5rem minmax(0, 1fr); gap: 3rem; max-width: 80rem; margin: 0 auto;
  padding: 0 2rem; }
nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: 2rem 0.5rem 2rem 0;
  font-size: 0.875rem; line-height: 1.45; }
nav h2 { font-size: 0.75rem; text-transform: uppercase; letter-spacing: 0.08em; color: var(--soft);
  margin: 0 0 0.5rem; }
nav ul { list-style: none; margin: 0; padding: 0; }
nav li { margin: 0.3rem 0; }
nav ul ul { margin: 0.2rem 0 0.8rem; padding-left: 0.6rem; border-left: 1px solid var(--line); }
nav a { color: inherit; text-decoration: none; overflow-wrap: anywhere; }
nav a:hover { color: var(--accent); text-decoration: underline; }
main { padding: 1rem 0 6rem; min-width: 0; }
section { padding-top: 1.5rem; }
h2 { font-size: 1.6rem; letter-spacing: -0.01em; margin: 1rem 0 0.8rem; line-height: 1.25; }
h2 a, h3 a { color: inherit; text-decoration: none; }
h2 a:hover, h3 a:hover { text-decoration: underline; }
h3 { font-size: 1.1rem; margin: 0 0 0.4rem; line-height: 1.4; overflow-wrap: anywhere; }
h4 { font-size: 0.8rem; text-transform: uppercase; letter-spacing: 0.06em; color: var(--soft);
  margin: 1.4rem 0 0.4rem; }
p, main > section > ul { max-width: 46rem; }
article { border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem 1.5rem; margin: 1.25rem 0;
  background: var(--card); }
article:target { border-color: var(--accent); }
article > :last-child { margin-bottom: 0; }
.summary { font-weight: 600; margin: 0 0 0.4rem; }
.meta, .optional { color: var(--soft); font-size: 0.875rem; }
.method { display: inline-block; font: 600 0.72rem/1 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  letter-spacing: 0.03em; color: var(--get); }
h3 .method { border: 1px solid currentColor; border-radius: 5px; padding: 0.3rem 0.45rem; vertical-align: 0.1em;
  margin-right: 0.3rem; }
.post { color: var(--post); } .put { color: var(--put); } .delete { color: var(--delete); }
code, pre { font: 0.875em/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { background: var(--code); border-radius: 4px; padding: 0.1em 0.3em; overflow-wrap: anywhere; }
h3 code { background: none; padding: 0; font-size: 1em; }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 8px; padding: 0.9rem 1rem;
  overflow-x: auto;
  max-height: 34rem; margin: 0.8rem 0; }
pre code { background: none; padding: 0; overflow-wrap: normal; font-size: 1em; }
.scroll { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; line-height: 1.5; }
th { text-align: left; font-size: 0.78rem; color: var(--soft); font-weight: 600; }
th, td { padding: 0.5rem 0.8rem 0.5rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
td code { white-space: nowrap; }
td:last-child { min-width: 8rem; }
:target > code, code:target { background: var(--accent); color: var(--paper); }
details { border-top: 1px solid var(--line); padding: 0.6rem 0; }
summary { cursor: pointer; font-size: 0.95rem; }
summary:hover { color: var(--accent); }
@media (max-width: 60rem) {
  .columns { display: block; padding: 0 1rem; }
  nav { position: static; max-height: none; padding-bottom: 0; border-bottom: 1px solid var(--line); }
  header { padding: 2rem 1rem 1.2rem; }
  h1 { font-size: 1.7rem; }
  article { padding: 1rem; }
}
@media print { nav, .skip { display: none; } .columns { display: block; } article { break-inside: avoid;
  } pre { max-height: none; } }
"""
