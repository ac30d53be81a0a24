// Highlighted code. The library and a language are loaded when an answer has code in it.

const NAMES = {
  bash: ["sh", "shell", "zsh", "console"],
  cpp: ["c", "c++", "h", "hpp", "cc", "cuda"],
  css: ["scss", "less"],
  diff: ["patch"],
  go: ["golang"],
  java: ["kotlin"],
  javascript: ["js", "jsx", "mjs"],
  json: ["jsonc", "json5", "jsonl"],
  markdown: ["md"],
  python: ["py", "python3", "gyp"],
  rust: ["rs"],
  sql: ["sqlite", "postgresql", "mysql"],
  typescript: ["ts", "tsx"],
  xml: ["html", "svg", "xhtml"],
  yaml: ["yml"],
};
const LANGUAGES = new Map(
  Object.entries(NAMES).flatMap(([name, others]) => [name, ...others].map((other) => [other, name])),
);

const LONGEST = 60_000; // characters; more would hold up the page

const loaded = new Map();

async function load(name) {
  const [{ default: library }, { default: grammar }] = await Promise.all([
    import("./vendor/highlight/core.js"),
    import(`./vendor/highlight/${name}.js`),
  ]);
  library.registerLanguage(name, grammar);
  return library;
}

// Highlights an element `code` of a known language. Its text stays as it is.
export async function highlight(code) {
  const name = LANGUAGES.get(code.className.replace("language-", "").toLowerCase());
  const text = code.textContent;
  if (!name || text.length > LONGEST) return;
  if (!loaded.has(name)) loaded.set(name, load(name));
  try {
    const library = await loaded.get(name);
    const { value } = library.highlight(text, { language: name, ignoreIllegals: true });
    if (code.textContent !== text) return;
    code.replaceChildren(
      globalThis.DOMPurify.sanitize(value, {
        ALLOWED_TAGS: ["span"],
        ALLOWED_ATTR: ["class"],
        RETURN_DOM_FRAGMENT: true,
      }),
    );
  } catch {
    loaded.delete(name); // the server was away: the code stays plain
  }
}
