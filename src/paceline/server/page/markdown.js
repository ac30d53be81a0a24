// Markdown of an answer as elements, block by block while the answer grows.
//
// Invariants: markup in an answer is text; what is inserted was sanitised; a block whose source is
// the same keeps its elements, so that a selection and the place of scrolling stay.

import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";
import { button, copy, element } from "./dom.js";
import { highlight } from "./code.js";

const escaped = (text) =>
  text.replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);

const TOP = 3; // the level of a message's own heading

const reader = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // Pictures would be requests to other hosts.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) =>
      `<pre><code class="language-${escaped((lang ?? "").trim().split(/\s/)[0])}">${escaped(text)}</code></pre>`,
    heading({ tokens, depth, level = Math.min(depth + TOP, 6) }) {
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    ...["p", "br", "hr", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote"],
    ...["ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a"],
  ],
  ALLOWED_ATTR: ["href", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function sanitised(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  // What is wider than the screen scrolls on its own, also by keyboard.
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", "", "table");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) framed(pre);
  return fragment;
}

// Code with its language and a button that copies it.
function framed(pre) {
  const frame = element("div", "", "code");
  const code = pre.firstElementChild;
  const language = code.className.replace("language-", "");
  const head = element("div", "", "code-head");
  const copier = button("Copy", () => copy(code.textContent, copier), "Copy the code");
  head.append(element("span", language), copier);
  pre.tabIndex = 0;
  pre.replaceWith(frame);
  frame.append(head, pre);
}

// Headings go down one level at a time, whatever the model wrote, as screen readers expect.
function levelled(tokens) {
  let level = TOP;
  for (const token of tokens) {
    if (token.type === "heading") token.level = level = Math.min(token.depth + TOP, level + 1, 6);
  }
  return tokens;
}

// Replaces the tokens of each table in a text by the table, whose cells get the tokens' tints.
export function tabulate(root, text) {
  let start = 0;
  const tables = [];
  for (const token of reader.lexer(text)) {
    if (token.type === "table") tables.push([start, token]);
    start += token.raw.length;
  }
  if (start !== text.length) return; // the reader changes some line ends
  for (const [from, token] of tables.reverse()) {
    const range = rangeOf(root, from, from + token.raw.trimEnd().length);
    const table = sanitised(reader.parser([token]));
    tint(table, [...range.extractContents().childNodes]);
    range.insertNode(table);
  }
}

function rangeOf(root, from, to) {
  const range = new Range();
  let end = 0;
  for (const node of root.childNodes) {
    const words = node.firstChild ?? node;
    const start = end;
    end += node.textContent.length;
    if (start <= from && from < end) range.setStart(words, from - start);
    if (start < to && to <= end) range.setEnd(words, to - start);
  }
  return range;
}

// A table's cells and its source have the same characters in the same order, but for Markdown's marks.
function tint(table, tokens) {
  const letters = tokens.flatMap((token) => [...token.textContent].map((letter) => [letter, token]));
  const walker = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
  const words = [];
  while (walker.nextNode()) if (walker.currentNode.data.trim()) words.push(walker.currentNode);
  for (const word of words) {
    const parts = [];
    let last = null;
    for (const letter of word.data) {
      const place = letters.findIndex(([other]) => other === letter);
      const [[, token]] = place < 0 ? [[letter, last]] : letters.splice(0, place + 1).slice(-1);
      if (!parts.length || token !== last) {
        parts.push(element("span", "", token?.className));
        if (token?.title) parts.at(-1).title = token.title;
      }
      parts.at(-1).textContent += letter;
      last = token;
    }
    word.replaceWith(...parts);
  }
}

export class Markdown {
  #root;
  #blocks = []; // { source, level, nodes, code, closed }

  constructor(root) {
    this.#root = root;
    root.replaceChildren();
  }

  // Shows a text; `whole`: it does not grow any more, so that its last code may be highlighted.
  show(text, whole) {
    const tokens = levelled(reader.lexer(text)).filter(({ type }) => type !== "space");
    tokens.forEach((token, place) => {
      const closed = whole || place < tokens.length - 1;
      const block = this.#blocks[place];
      if (block?.source === token.raw && block.level === token.level) {
        if (closed && !block.closed) this.#close(block);
        return;
      }
      if (block?.code && token.type === "code" && block.language === token.lang && !block.closed) {
        block.code.textContent = token.text;
        block.source = token.raw;
      } else {
        this.#replace(place, token);
      }
      if (closed) this.#close(this.#blocks[place]);
    });
    for (const { nodes } of this.#blocks.splice(tokens.length)) nodes.forEach((node) => node.remove());
  }

  #replace(place, token) {
    const fragment = sanitised(reader.parser([token]));
    const nodes = [...fragment.childNodes];
    const code = token.type === "code" ? fragment.querySelector("code") : null;
    const next = this.#blocks.slice(place + 1).find((block) => block.nodes.length)?.nodes[0] ?? null;
    this.#blocks[place]?.nodes.forEach((node) => node.remove());
    this.#root.insertBefore(fragment, next);
    this.#blocks[place] = { source: token.raw, level: token.level, language: token.lang, nodes, code };
  }

  #close(block) {
    block.closed = true;
    for (const node of block.nodes) {
      if (node.nodeType !== Node.ELEMENT_NODE) continue;
      for (const code of node.querySelectorAll(".code code")) highlight(code);
    }
  }
}
