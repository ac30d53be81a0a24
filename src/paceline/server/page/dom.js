// Elements, numbers, and what a browser does with text: copy and download.

export const at = (id) => document.getElementById(id);

export function element(name, text = "", kind = "") {
  const node = document.createElement(name);
  node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

// A button; `label` is its name where the text alone does not say what it acts on.
export function button(text, onClick, label = "") {
  const node = element("button", text);
  node.type = "button";
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", onClick);
  return node;
}

export const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
export const two = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
export const percent = new Intl.NumberFormat("en", { style: "percent" });

// For screen readers: what has just happened.
export function announce(text) {
  at("status").textContent = text;
}

// A line for the user about what went wrong; empty: nothing is wrong any more.
export function trouble(error) {
  at("alert").textContent = error?.message ?? "";
}

export async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS browsers have a clipboard for pages of this machine alone.
    const field = element("textarea", text, "hidden");
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    from.focus();
  }
  announce("Copied.");
  from.classList.add("done");
  setTimeout(() => from.classList.remove("done"), 1500);
}

export function download(name, text, kind) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
