// Fill the list of versions from versions.js, which lies beside the folders of all versions; no server is needed.
const list = document.getElementById("version-switcher");
if (list && window.FENCHEL_VERSIONS) {
  const { version } = list.dataset;
  const root = document.documentElement.dataset.content_root || "./";
  const names = window.FENCHEL_VERSIONS.includes(version) ? window.FENCHEL_VERSIONS : [version, ...window.FENCHEL_VERSIONS];
  list.replaceChildren(...names.map((name, place) => {
    const label = place === 0 && names.length > 1 ? `${name} (latest)` : name;
    return new Option(label, name, name === version, name === version);
  }));
  list.addEventListener("change", () => {
    window.location.href = `${root}../${list.value}/index.html`;
  });
}
