// What a token is, in the bar below; which tokens a block drafts, in the text above it.
const info = document.getElementById("info");
const clear = () => document.querySelectorAll(".on").forEach((token) => token.classList.remove("on"));
const point = (event) => {
  if (!(event.target instanceof Element)) return;
  const named = event.target.closest("[title]");
  if (named) info.textContent = named.title;
  clear();
  const block = event.target.closest(".block");
  if (!block) return;
  const first = Number(block.dataset.a), end = first + Number(block.dataset.k);
  for (const token of block.closest(".sample").querySelectorAll(".t")) {
    const at = Number(token.dataset.p);
    if (at >= first && at < end) token.classList.add("on");
  }
};
for (const kind of ["pointerover", "click", "focusin"]) document.addEventListener(kind, point);
