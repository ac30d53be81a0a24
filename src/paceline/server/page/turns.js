// A message on the screen: the user's as it is, an answer as Markdown, or as its tokens with tints.
//
// A view draws what its message has at the moment; the message is the page's.

import { button, copy, element } from "./dom.js";
import { Markdown, tabulate } from "./markdown.js";

class View {
  constructor(message, name, kind) {
    this.message = message;
    this.article = element("article", "", kind);
    this.words = element("div", "", "words");
    this.actions = element("div", "", "actions");
    this.article.append(element("h3", name), this.words, this.actions);
  }

  // Replaces the buttons below the message: [text, what it does] each.
  act(actions) {
    this.actions.replaceChildren(
      ...actions.map(([text, onClick]) => {
        const action = button(text, () => onClick(action));
        return action;
      }),
    );
  }
}

export class UserView extends View {
  constructor(message) {
    super(message, message.role === "tool" ? `Result of ${message.name}` : "You", "user");
    this.draw();
  }

  draw() {
    this.words.textContent = this.message.content;
    this.words.hidden = !this.message.content;
    this.article.querySelectorAll(".file").forEach((file) => file.remove());
    for (const { name, text } of this.message.files ?? []) {
      const fold = element("details", "", "file");
      const content = element("pre", text);
      content.tabIndex = 0;
      fold.append(element("summary", name), content);
      this.words.before(fold);
    }
  }

  // A field in place of the text. `onSend` gets the new text.
  edit(onSend, warning) {
    const form = element("form", "", "edit");
    const field = element("textarea");
    field.value = this.message.content;
    field.setAttribute("aria-label", "Edited message");
    field.rows = Math.min(12, field.value.split("\n").length + 1);
    const end = () => {
      form.remove();
      this.words.hidden = !this.message.content;
      this.actions.hidden = false;
    };
    const cancel = () => {
      end();
      this.actions.querySelector("button")?.focus();
    };
    const send = element("button", "Send");
    const buttons = element("div", "", "buttons");
    buttons.append(element("span", warning, "help"), button("Cancel", cancel), send);
    form.append(field, buttons);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      end();
      onSend(field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.words.hidden = this.actions.hidden = true;
    this.words.after(form);
    field.focus();
  }
}

export class AnswerView extends View {
  #tinted;
  #markdown = null;
  #rest = null; // the text after the last token
  #drawn = 0; // tokens
  #length = 0; // characters of those tokens
  #thought = null;
  #waiting = true; // drawn as plain text, until it comes into view

  constructor(message, name, tinted) {
    super(message, name, "model");
    this.#tinted = tinted;
    this.words.textContent = message.content;
    this.note(message.note);
  }

  // Draws the message once it is near: of a long chat most is never looked at.
  near() {
    if (this.#waiting) this.draw(true);
  }

  set tinted(tinted) {
    if (tinted === this.#tinted) return;
    this.#tinted = tinted;
    this.restart();
    if (!this.#waiting) this.draw(true);
  }

  // The next drawing is of the whole message, not of what is new.
  restart() {
    this.#markdown = this.#rest = null;
  }

  // Draws what is new; `whole`: the answer does not grow any more.
  draw(whole) {
    const { content, reasoning_content: thought, tool_calls: calls = [] } = this.message;
    this.#waiting = false;
    if (thought) this.#think(thought, whole || content);
    this.words.classList.toggle("raw", this.#tinted);
    if (this.#tinted) {
      if (whole) this.restart(); // an answer that goes on has its tables as text again
      this.#drawTokens(content);
      if (whole) tabulate(this.words, content);
    } else (this.#markdown ??= new Markdown(this.words)).show(content, whole);
    const boxes = this.article.querySelectorAll(".call");
    calls.forEach(({ function: { name, arguments: values } }, place) => {
      const box = boxes[place] ?? element("pre", "", "call");
      if (!boxes[place]) this.actions.before(box);
      box.textContent = `${name}(${values})`;
    });
  }

  // A line below the answer.
  note(text = "") {
    this.article.querySelector(".note")?.remove();
    if (text) this.actions.before(element("p", text, "note"));
  }

  #think(text, ended) {
    if (!this.#thought) {
      const fold = element("details", "", "thought");
      this.#thought = element("p");
      fold.append(element("summary"), this.#thought);
      this.words.before(fold);
    }
    this.#thought.textContent = text;
    this.#thought.previousSibling.textContent = ended ? "Thoughts" : "Thinking …";
  }

  // Text may arrive before its tokens; it is not tinted until then.
  #drawTokens(content) {
    if (!this.#rest) {
      this.#rest = document.createTextNode("");
      this.#drawn = this.#length = 0;
      this.words.replaceChildren(this.#rest);
    }
    const { tokens = [] } = this.message;
    for (const [length, source] of tokens.slice(this.#drawn)) {
      const text = content.slice(this.#length, this.#length + length);
      const token = element("span", text, source ? "drafted" : "own");
      if (source) token.title = `drafted by ${source}`;
      this.#rest.before(token);
      this.#length += length;
    }
    this.#drawn = tokens.length;
    this.#rest.data = content.slice(this.#length);
  }
}

export function copying(message) {
  return ["Copy", (action) => copy(message.content, action)];
}
